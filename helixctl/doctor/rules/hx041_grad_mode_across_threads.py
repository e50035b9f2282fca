"""HX041: no_grad does not reach into threads.

What it checks
    Threads started inside `with torch.no_grad()`, inference_mode() or autocast().
Why it matters
    These modes belong to a thread. The new one records gradients, or computes in another precision, all the same.
Fix
    Enter the mode in the function that the thread runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.flow import blocks_that_start_threads
from helixctl.doctor.source import Source

LEVEL = "info"
MARKERS = ((b"hread", b"no_grad"), (b"hread", b"inference_mode"), (b"hread", b"autocast"))
_MODES = ("torch.no_grad", "torch.inference_mode", "torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast")


def check(source: Source) -> Iterator[Hit]:
    """Blocks that start threads."""
    for item, start in blocks_that_start_threads(source, _MODES):
        yield Hit(start, f"{ast.unparse(item.context_expr)} does not hold in the thread that is started here")
