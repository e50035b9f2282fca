"""HX011: a worker is given a function that does not pickle.

What it checks
    Lambdas and functions defined inside functions as collate_fn or worker_init_fn, as target of a Process, or as the
    function of a process pool. An error where the start method is spawn or forkserver, where Python 3.14 is the
    target, and for pools, which always pickle; a warning elsewhere.
Why it matters
    Under spawn and forkserver everything that a worker gets is pickled: "Can't pickle local object". Code that relies
    on fork stops working on Python 3.14.
Fix
    Move it to module level, or make it a class with __call__; functools.partial of a module-level function is fine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source
from helixctl.doctor.workers import WorkerCallable, worker_callables

LEVEL = "warning"
MARKERS = (b"DataLoader", b"multiprocessing", b"ProcessPoolExecutor")


def check(source: Source) -> Iterator[Hit]:
    """Callables that cannot be found by name in another process."""
    for given in worker_callables(source):
        kind = _local_kind(source, given)
        if kind is not None:
            level = "error" if given.is_pickled(source.options.target_python) else None
            yield Hit(given.node, f"{given.role} is {kind}, which does not pickle", "error" if level else None)


def _local_kind(source: Source, given: WorkerCallable) -> str | None:
    definition = source.names.definition(given.node)
    if isinstance(definition, ast.Lambda):
        return "a lambda"
    if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        scope = source.index.scope_node(definition)
        if not isinstance(scope, ast.Module | ast.ClassDef):
            return f"{definition.name}(), defined inside a function"
    return None
