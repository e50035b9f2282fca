"""What a look at a published drafter finds: sentences with a severity, and what each engine would do with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

S = TypeVar("S")
"""A published folder, as the rules see it."""
_ORDER = ("error", "warning", "note")


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


def judge(
    seen: S,
    rules: Sequence[Callable[[S], Iterator[Finding]]],
    uses: Mapping[str, Callable[[S], dict[str, str]]],
) -> tuple[tuple[Finding, ...], tuple[EngineView, ...]]:
    """Everything that ``rules`` find, worst first, and what each engine would do.

    Args:
        seen: The folder.
        rules: Each finds what it looks for.
        uses: By engine, what it would use; not asked of one that has an error against it.
    """
    found = sorted((f for rule in rules for f in rule(seen)), key=lambda finding: _ORDER.index(finding.severity))
    views = []
    for engine, used in uses.items():
        stopped = any(f.severity == "error" and (not f.engines or engine in f.engines) for f in found)
        views.append(EngineView(engine, not stopped, {} if stopped else used(seen)))
    return tuple(found), tuple(views)
