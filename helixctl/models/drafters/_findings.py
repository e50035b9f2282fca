"""What a look at a published drafter finds: sentences with a severity, and what each engine would do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header of its file describes it."""

    dtype: str
    """As torch calls it: bfloat16, float32, ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or worth knowing."""

    severity: Literal["error", "warning", "note"]
    """error: does not load, or drafts nonsense; warning: may draft worse than it could."""
    message: str
    engines: tuple[str, ...] = ()
    """Whom it concerns; empty: everybody."""
    fix: str | None = None


@dataclass(frozen=True)
class EngineView:
    """What one engine would make of the drafter."""

    engine: str
    reads: bool
    """It finds everything it needs, and computes what the drafter learned."""
    uses: Mapping[str, str]
    """What it would use, in its own words."""
