"""HX051: pinned memory that does not work out.

What it checks
    pin_memory=True on a loader whose dataset or collate_fn makes CUDA tensors; .to(..., non_blocking=True) on batches
    of a loader without pin_memory.
Why it matters
    Only CPU tensors can be pinned, and a copy from memory that is not pinned blocks whatever it is told.
Fix
    Return CPU tensors from workers, pin them in the loader, and move them in the training loop with
    non_blocking=True.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.cuda import DATALOADER, LOADER_POSITIONS, cuda_flow, loader_functions
from helixctl.doctor.finding import Hit
from helixctl.doctor.names import UNKNOWN_VALUE, Called
from helixctl.doctor.source import Source

LEVEL = "info"
MARKERS = (b"DataLoader",)


def check(source: Source) -> Iterator[Hit]:
    """Loaders with and without pinning."""
    flow = None
    for call in source.calls_of(DATALOADER):
        node = call.argument("pin_memory", LOADER_POSITIONS["pin_memory"])
        pinned = False if node is None and not call.open else source.names.constant(node)
        if pinned is True:
            flow = flow or cuda_flow(source)
            if any(flow.first(function) is not None for function in loader_functions(source, call)):
                yield Hit(call.node, "pin_memory=True, but the workers make CUDA tensors")
        elif pinned is not UNKNOWN_VALUE:
            yield from _copies(source, call)


def _copies(source: Source, call: Called) -> Iterator[Hit]:
    """non_blocking copies in loops over the loader."""
    for loop in source.index.nodes(ast.For):
        loops_over = any(
            source.names.value(part) is call.node for part in ast.walk(loop.iter) if isinstance(part, ast.expr)
        )
        for node in ast.walk(loop) if loops_over else ():
            moves = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("to", "cuda")
            if moves and isinstance(node, ast.Call) and any(k.arg == "non_blocking" for k in node.keywords):
                yield Hit(node, f"non_blocking has no effect: the loader of line {call.node.lineno} does not pin")
