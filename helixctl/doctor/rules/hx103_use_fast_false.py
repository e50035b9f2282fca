"""HX103: use_fast=False.

What it checks
    use_fast=False in a call of from_pretrained of a tokenizer.
Why it matters
    transformers 5 ignores it. Under version 4 the slow tokenizer has no offsets, so masks of assistant tokens are
    wrong.
Fix
    Remove it.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"use_fast",)


def check(source: Source) -> Iterator[Hit]:
    """Calls that ask for the slow tokenizer."""
    for call in source.calls:
        if source.names.constant(call.keywords.get("use_fast")) is False and "okenizer" in call.name:
            yield Hit(call.node, "use_fast=False is ignored by transformers 5 and breaks masks before")
