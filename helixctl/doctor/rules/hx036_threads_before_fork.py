"""HX036: threads are started, then the process forks.

What it checks
    Thread.start() before os.fork, a fork context or a loader with multiprocessing_context="fork", in the same
    function or what it calls (an error); before processes of the default start method (a warning).
Why it matters
    Only the forking thread exists in the child. Whatever lock another one held stays locked: the child hangs,
    sometimes.
Fix
    Start processes first, or start them with get_context("spawn").
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.cuda import DATALOADER, execs, loader_context, process_starts
from helixctl.doctor.finding import Hit, Level
from helixctl.doctor.flow import Flow
from helixctl.doctor.source import Source

LEVEL = "error"
MARKERS = (b"Thread",)


def check(source: Source) -> Iterator[Hit]:
    """Forks with threads before them."""
    if "threading" not in source.imports and "concurrent" not in source.imports:
        return
    flow = None
    for node, level in _forks(source):
        flow = flow or Flow(source, lambda call: source.names.qualified(call.func) == "threading.Thread().start")
        start = flow.before(node, 0)
        if start is not None:
            yield Hit(node, f"this forks after a thread was started in line {start.lineno}", level)


def _forks(source: Source) -> Iterator[tuple[ast.Call, Level]]:
    old = source.options.target_python is None or source.options.target_python < (3, 14)
    for call, method in process_starts(source):
        if method == "fork" or (method == "default" and old):
            yield call.node, "error" if method == "fork" else "warning"
    for call in source.calls:
        is_fork = call.name in ("os.fork", "os.forkpty", "pty.fork") and not execs(source, call.node)
        if is_fork or (DATALOADER in call.names and loader_context(source, call) == "fork"):
            yield call.node, "error"
