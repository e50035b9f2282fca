"""HX033: a queue without a bound.

What it checks
    queue.Queue, LifoQueue and PriorityQueue without maxsize, multiprocessing queues likewise. maxsize=0 written out
    is taken as meant.
Why it matters
    When the consumer is slower than the producer the queue grows until memory is gone, and the producer's speed says
    nothing.
Fix
    Give it a maxsize; 2 to 4 items are enough to overlap two stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"Queue",)
_QUEUES = (
    "queue.Queue",
    "queue.LifoQueue",
    "queue.PriorityQueue",
    "multiprocessing.Queue",
    "multiprocessing.JoinableQueue",
)
_CONCURRENT = frozenset({"threading", "multiprocessing", "concurrent", "torch", "queue"})


def check(source: Source) -> Iterator[Hit]:
    """Queues made in files that have something to do with threads or processes."""
    if not source.imports & _CONCURRENT:
        return
    contexts = tuple(f"multiprocessing.get_context().{name}" for name in ("Queue", "JoinableQueue"))
    for call in source.calls_of(*_QUEUES, *contexts):
        if call.argument("maxsize", 0) is None and not call.open:
            yield Hit(call.node, f"{call.name.rsplit('.', 1)[1]}() has no maxsize")
