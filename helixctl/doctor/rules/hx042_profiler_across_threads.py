"""HX042: a profiler sees its own thread.

What it checks
    Threads started inside `with torch.profiler.profile()`.
Why it matters
    CPU events of other threads are missing from the trace unless they were there when the profiler started.
Fix
    Start the threads first, or profile from outside (py-spy).
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.flow import blocks_that_start_threads
from helixctl.doctor.source import Source

LEVEL = "info"
MARKERS = ((b"profile", b"hread"),)
_PROFILERS = ("torch.profiler.profile", "torch.autograd.profiler.profile")


def check(source: Source) -> Iterator[Hit]:
    """Blocks that start threads."""
    for _, start in blocks_that_start_threads(source, _PROFILERS):
        yield Hit(start, "the profiler does not see the thread that is started here")
