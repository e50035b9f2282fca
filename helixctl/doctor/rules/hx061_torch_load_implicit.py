"""HX061: torch.load without weights_only.

What it checks
    torch.load(path) that does not say weights_only. A warning where target-torch is below 2.6.
Why it matters
    Up to torch 2.5 the default runs whatever code the file holds; from 2.6 on it refuses.
Fix
    Write weights_only=True.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "info"
MARKERS = ((b"torch", b".load("), (b"torch", b"import load"))


def check(source: Source) -> Iterator[Hit]:
    """Loads that leave it to the version."""
    oldest = source.options.target_torch
    level = "warning" if oldest is not None and oldest < (2, 6) else None
    for call in source.calls_of("torch.load"):
        if "weights_only" not in call.keywords and not call.open:
            yield Hit(
                call.node,
                "weights_only is not given; its default differs between versions",
                "warning" if level else None,
            )
