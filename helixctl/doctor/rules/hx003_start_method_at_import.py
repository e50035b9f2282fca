"""HX003: the start method is set while a module is imported.

What it checks
    set_start_method() outside of functions and of `if __name__ == "__main__":`, tests left out.
Why it matters
    It may be called once per process: the second import, or a library that did it first, raises RuntimeError. Spawned
    children import the module again.
Fix
    Call it under `if __name__ == "__main__":`. Better: pass a context from get_context() to what starts processes.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "error"
MARKERS = (b"set_start_method",)


def check(source: Source) -> Iterator[Hit]:
    """Calls at module level."""
    for call in source.calls_of("multiprocessing.set_start_method"):
        if source.runs_at_import(call.node) and not source.is_test and not source.is_notebook:
            yield Hit(call.node, "set_start_method() runs at import")
