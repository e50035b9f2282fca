"""HX002: fork is asked for by name.

What it checks
    set_start_method("fork"), get_context("fork"), multiprocessing_context="fork",
    start_processes(start_method="fork"), and os.fork where no exec follows. An error in files that import torch, a
    warning elsewhere.
Why it matters
    A forked child inherits locks as they were and none of the threads that would release them, and cannot use CUDA
    once its parent has. In a training process both happen sooner or later.
Fix
    Use "spawn" or "forkserver". For work on the CPU only, where copy-on-write is wanted, switch the rule off for the
    file.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.cuda import execs
from helixctl.doctor.finding import Hit, Level
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"fork",)
_PLACES = {
    "multiprocessing.set_start_method": ("method", 0),
    "multiprocessing.get_context": ("method", 0),
    "multiprocessing.start_processes": ("start_method", 5),
    "torch.utils.data.DataLoader": ("multiprocessing_context", None),
}


def check(source: Source) -> Iterator[Hit]:
    """Forks by name."""
    level: Level = "error" if "torch" in source.imports and not source.is_test else "warning"
    for call in source.calls:
        for name in call.names & _PLACES.keys():
            method = call.argument(*_PLACES[name])
            if source.names.constant(method) == "fork":
                yield Hit(call.node, 'the start method is "fork"', level)
        if call.name in ("os.fork", "os.forkpty", "pty.fork") and not execs(source, call.node):
            yield Hit(call.node, f"{call.name}() without an exec behind it", level)
