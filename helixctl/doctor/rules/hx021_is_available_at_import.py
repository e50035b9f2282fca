"""HX021: torch.cuda.is_available() at import.

What it checks
    The call at module level, tests and notebooks left out.
Why it matters
    Unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set it initialises the driver: children forked later cannot use CUDA,
    and CUDA_VISIBLE_DEVICES is read once and for all.
Fix
    Ask in a function, or set PYTORCH_NVML_BASED_CUDA_CHECK=1 before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "info"
MARKERS = (b"is_available",)


def check(source: Source) -> Iterator[Hit]:
    """Calls at module level."""
    if source.is_test or source.is_notebook:
        return
    for call in source.calls_of("torch.cuda.is_available"):
        if source.runs_at_import(call.node):
            yield Hit(call.node, "is_available() at import initialises the CUDA driver")
