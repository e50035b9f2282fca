"""What is handed to worker processes: shared by the rules about pickling."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from helixctl.doctor.cuda import LOADER_POSITIONS, global_method, loader_context, loaders, process_starts
from helixctl.doctor.source import Source

_SPAWNS = ("spawn", "forkserver")
_POOL_METHODS = frozenset(
    {"map", "map_async", "imap", "imap_unordered", "starmap", "starmap_async", "apply", "apply_async", "submit"}
)
_POOLS = (
    "multiprocessing.Pool()",
    "multiprocessing.get_context().Pool()",
    "concurrent.futures.ProcessPoolExecutor()",
)
_DATASETS = frozenset({"torch.utils.data.Dataset", "torch.utils.data.IterableDataset"})


@dataclass(frozen=True)
class WorkerCallable:
    """A function for a worker: its expression, what it is for, and how the worker starts."""

    node: ast.expr
    role: str
    method: str
    """A start method, "default", "given" (cannot be read), or "always" where it is pickled whatever the method."""

    def is_pickled(self, target_python: tuple[int, int] | None) -> bool:
        """Whether it certainly has to pickle."""
        by_default = target_python is not None and target_python >= (3, 14)
        return self.method in (*_SPAWNS, "always") or (self.method == "default" and by_default)


def worker_callables(source: Source) -> Iterator[WorkerCallable]:
    """Every callable that a call in this file hands to another process."""
    if "multiprocess" in source.imports or "pathos" in source.imports:
        return  # they pickle with dill, which can do lambdas
    for call, _ in loaders(source):
        method = loader_context(source, call) or global_method(source) or "default"
        for name in ("collate_fn", "worker_init_fn"):
            node = call.argument(name, LOADER_POSITIONS[name])
            if node is not None:
                yield WorkerCallable(node, name, method)
    for call, method in process_starts(source):
        target = call.argument("target", 1) if call.name.endswith("Process") else call.argument("initializer", 1)
        if target is not None and (call.name.endswith("Process") or "initializer" in call.keywords):
            yield WorkerCallable(target, "the target", method)
    yield from _pool_functions(source)


def _pool_functions(source: Source) -> Iterator[WorkerCallable]:
    for call in source.calls:
        base, _, method = call.name.rpartition(".")
        is_pool = base in _POOLS and method in _POOL_METHODS
        if (is_pool or call.name in ("multiprocessing.spawn", "multiprocessing.start_processes")) and call.args:
            yield WorkerCallable(call.args[0], f"the function of {method}()", "always" if is_pool else "spawn")


def is_dataset(source: Source, owner: ast.ClassDef) -> bool:
    """Whether a class derives from torch's Dataset, as far as this file tells."""
    return bool(source.names.classes(owner) & _DATASETS)
