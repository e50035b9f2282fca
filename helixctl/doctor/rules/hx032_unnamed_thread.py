"""HX032: a thread without a name.

What it checks
    Thread(target=...) without name=.
Why it matters
    Stack dumps and profilers show "Thread-7": which stage is busy, or stuck, has to be guessed.
Fix
    Pass name=, 15 bytes at most so that the operating system shows it whole. `--fix` takes the function's name.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.fixes import insert_argument
from helixctl.doctor.source import Source

LEVEL = "info"
MARKERS = (b"Thread",)
_MAX_BYTES = 15


def check(source: Source) -> Iterator[Hit]:
    """Threads made directly."""
    for call in source.calls:
        target = call.argument("target", 1)
        if call.name != "threading.Thread" or call.open or target is None or call.argument("name", 2) is not None:
            continue
        name = getattr(target, "attr", None) or getattr(target, "id", None)
        written = any(keyword.arg == "target" for keyword in call.node.keywords)
        text = f'name="{str(name).strip("_")[:_MAX_BYTES]}"'
        edits = insert_argument(source, call.node, text) if name and written and isinstance(name, str) else ()
        yield Hit(call.node, "this thread has no name", None, edits)
