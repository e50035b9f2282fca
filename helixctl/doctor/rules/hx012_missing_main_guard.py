"""HX012: processes are started while a script is imported.

What it checks
    At module level of a script, not under `if __name__ == "__main__":`: a Process, a Pool or an executor that is
    spawned, torch.multiprocessing.spawn, or a loop over a DataLoader with spawned workers. A warning where the start
    method is the default.
Why it matters
    A spawned child imports the script again, reaches the same line, and dies: "An attempt has been made to start a
    new process before the current process has finished its bootstrapping phase".
Fix
    Put what the script does into main(), called under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.cuda import global_method, loader_context, loaders, process_starts
from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "error"
MARKERS = (b"multiprocessing", b"DataLoader", b"ProcessPoolExecutor")


def check(source: Source) -> Iterator[Hit]:
    """Starts at import."""
    if not source.is_script or source.is_notebook or source.is_test:
        return
    for node, method in _starts(source):
        if method not in ("fork", "given") and source.runs_at_import(node):
            message = "this starts processes whenever the file is imported, also in the processes that it starts"
            yield Hit(node, message, "warning" if method == "default" else None)


def _starts(source: Source) -> Iterator[tuple[ast.Call, str]]:
    for call, method in process_starts(source):
        yield call.node, method
    for call in source.calls_of("multiprocessing.spawn", "multiprocessing.start_processes"):
        yield call.node, "spawn"
    for call, _ in loaders(source):
        if _is_iterated_at_import(source, call.node):
            yield call.node, loader_context(source, call) or global_method(source) or "default"


def _is_iterated_at_import(source: Source, loader: ast.Call) -> bool:
    """A loop at module level goes over the loader."""
    for loop in source.index.nodes(ast.For):
        if not source.runs_at_import(loop):
            continue
        for part in ast.walk(loop.iter):
            if isinstance(part, ast.expr) and source.names.value(part) is loader:
                return True
    return False
