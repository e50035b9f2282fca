"""HX015: a Dataset holds something that does not pickle.

What it checks
    self.x = a lock, thread, queue, open file, memory map, database or HDF5 handle, generator or lambda in the
    constructor of a Dataset that has no __getstate__ or __reduce__. A warning where the file's own loaders have no
    workers.
Why it matters
    Spawned workers get the dataset pickled: "cannot pickle '_thread.lock' object". Forked ones share the position of
    the open file and the state of the lock.
Fix
    Open it in the worker, on first use; or leave it out in __getstate__.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from helixctl.doctor.cuda import DATALOADER, loaders
from helixctl.doctor.finding import Hit, Level
from helixctl.doctor.source import Source
from helixctl.doctor.workers import is_dataset

LEVEL = "error"
MARKERS = (b"Dataset",)
_HANDLES = frozenset(
    {
        "threading.Lock", "threading.RLock", "threading.Condition", "threading.Event", "threading.Semaphore",
        "threading.BoundedSemaphore", "threading.Barrier", "threading.Thread", "threading.local", "queue.Queue",
        "queue.SimpleQueue", "queue.PriorityQueue", "queue.LifoQueue", "concurrent.futures.ThreadPoolExecutor",
        "concurrent.futures.ProcessPoolExecutor", "open", "io.open", "gzip.open", "mmap.mmap", "sqlite3.connect",
        "h5py.File", "lmdb.open", "zipfile.ZipFile", "tarfile.open", "_thread.allocate_lock",
    }
)  # fmt: skip
_PICKLES = {"__getstate__", "__reduce__", "__reduce_ex__"}


def check(source: Source) -> Iterator[Hit]:
    """Attributes set in constructors."""
    weaker: Level | None = "warning" if _has_no_workers(source) else None
    for owner in source.index.nodes(ast.ClassDef):
        if not is_dataset(source, owner) or any(source.names.method(owner, name) for name in _PICKLES):
            continue
        for statement in owner.body:
            if isinstance(statement, ast.FunctionDef) and statement.name in ("__init__", "__post_init__"):
                for hit in _held(source, statement):
                    yield replace(hit, level=weaker or hit.level)


def _has_no_workers(source: Source) -> bool:
    """The file makes loaders, and none of them may have workers."""
    calls = [*source.calls_of(DATALOADER)]
    return bool(calls) and not any(call.open for call in calls) and next(iter(loaders(source)), None) is None


def _held(source: Source, constructor: ast.FunctionDef) -> Iterator[Hit]:
    instance = constructor.args.args[0].arg if constructor.args.args else "self"
    for node in ast.walk(constructor):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            on_self = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
            if on_self and ast.unparse(target).startswith(f"{instance}."):
                what = _unpicklable(source, node.value)
                if what is not None:
                    yield Hit(node, f"{ast.unparse(target)} is {what[0]}, which does not pickle", what[1])


def _unpicklable(source: Source, node: ast.expr) -> tuple[str, Level | None] | None:
    value = source.names.value(node)
    if isinstance(value, ast.GeneratorExp):
        return "a generator", None
    if isinstance(source.names.definition(value), ast.Lambda):
        return "a lambda", "warning"
    name = source.names.qualified(value.func) if isinstance(value, ast.Call) else None
    return (f"a {name}()", None) if name in _HANDLES else None
