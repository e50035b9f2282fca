"""HX001: fork after CUDA.

What it checks
    A process is forked (os.fork, a fork context, or the default start method where that is fork) after a call that
    creates a CUDA context: in the same function, in the constructor of the same class, or in a caller in the same
    file.
Why it matters
    CUDA does not survive a fork. The child fails with "Cannot re-initialize CUDA in forked subprocess" or "CUDA
    error: initialization error", or hangs on a lock that a thread of the parent held.
Fix
    Start the process with get_context("spawn") or get_context("forkserver"). Or fork before anything touches CUDA.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.cuda import DATALOADER, cuda_flow, execs, loader_context, process_starts
from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "error"
MARKERS = ((b"cuda", b"fork"), (b"cuda", b"rocess"), (b"cuda", b"DataLoader"))
_FORKS = ("os.fork", "os.forkpty", "pty.fork")


def check(source: Source) -> Iterator[Hit]:
    """Forks with CUDA before them."""
    flow = None
    for node in _forks(source):
        flow = flow or cuda_flow(source)
        touch = flow.before(node)
        if touch is not None:
            yield Hit(node, f"this forks after CUDA was touched in line {touch.lineno}")


def _forks(source: Source) -> Iterator[ast.Call]:
    """Calls that fork, as far as the file tells."""
    for call in source.calls_of(*_FORKS):
        if not execs(source, call.node):
            yield call.node
    for call, method in process_starts(source):
        if method == "fork" or (method == "default" and _forks_by_default(source)):
            yield call.node
    for call in source.calls:
        is_loader = DATALOADER in call.names and loader_context(source, call) == "fork"
        if is_loader or (call.name == "multiprocessing.Process().start" and _forks_by_default(source)):
            yield call.node


def _forks_by_default(source: Source) -> bool:
    """Before Python 3.14."""
    return source.options.target_python is None or source.options.target_python < (3, 14)
