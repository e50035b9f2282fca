"""HX052: workers make CUDA tensors.

What it checks
    Calls that touch CUDA in __getitem__, __getitems__ or __iter__ of a Dataset (a warning), in the collate_fn of a
    DataLoader (an error where it has workers), or in functions that they call.
Why it matters
    A forked worker cannot use CUDA; a spawned one makes a CUDA context of its own, hundreds of megabytes each, and
    its tensors must outlive it.
Fix
    Return CPU tensors, and move them in the training loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.cuda import DATALOADER, LOADER_POSITIONS, cuda_flow, loaders
from helixctl.doctor.finding import Hit, Level
from helixctl.doctor.flow import Flow
from helixctl.doctor.index import Function
from helixctl.doctor.names import UNKNOWN_VALUE
from helixctl.doctor.source import Source
from helixctl.doctor.workers import is_dataset

LEVEL = "warning"
MARKERS = ((b"cuda", b"Dataset"), (b"cuda", b"DataLoader"))


def check(source: Source) -> Iterator[Hit]:
    """Functions that workers run."""
    flow: Flow | None = None
    levels: dict[ast.Call, Level] = {}
    for function, level in _worker_functions(source):
        flow = flow or cuda_flow(source)
        touch = flow.first(function)
        if touch is not None and levels.get(touch) != "error":
            levels[touch] = level
    for touch, level in levels.items():
        yield Hit(touch, "this runs in DataLoader workers and touches CUDA", level)


def _worker_functions(source: Source) -> Iterator[tuple[Function, Level]]:
    for owner in source.index.nodes(ast.ClassDef):
        for statement in owner.body if is_dataset(source, owner) else ():
            if isinstance(statement, ast.FunctionDef) and statement.name in ("__getitem__", "__getitems__", "__iter__"):
                yield statement, "warning"
    busy = {call.node for call, workers in loaders(source) if source.names.constant(workers) is not UNKNOWN_VALUE}
    for call in source.calls_of(DATALOADER):
        function = source.names.function(call.argument("collate_fn", LOADER_POSITIONS["collate_fn"]))
        if function is not None:
            yield function, "error" if call.node in busy else "warning"
