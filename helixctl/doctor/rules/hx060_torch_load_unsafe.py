"""HX060: torch.load may run code from the file.

What it checks
    torch.load(..., weights_only=False).
Why it matters
    A pickle can run anything. One downloaded checkpoint is enough.
Fix
    Use weights_only=True and torch.serialization.add_safe_globals, or safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"weights_only",)


def check(source: Source) -> Iterator[Hit]:
    """Loads that switch the protection off."""
    for call in source.calls_of("torch.load"):
        if source.names.constant(call.argument("weights_only")) is False:
            yield Hit(call.node, "weights_only=False runs whatever code the file holds")
