"""Is a drafter as sure of its drafts as it should be? What it told beside what became of them. Runs no model.

Two questions, as for acceptance by position. *Where reached*: of the drafts whose predecessors were all accepted, how
many were accepted, against what was told of each. *Up to the draft*: of all judged drafts, how many blocks were
accepted up to there, against the product of what was told; that product is what a threshold cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from helixctl.decoding.acceptance import judged_cycles
from helixctl.decoding.decoded import Decoded

NUM_BINS = 10


@dataclass(frozen=True)
class Bin:
    """Drafts of which about the same was told."""

    low: float
    high: float
    """Probabilities from `low` to below `high`; the last bin has 1 too."""
    num_drafts: int
    predicted: float
    """Mean of what was told."""
    accepted: float
    """Share that was accepted."""


@dataclass(frozen=True)
class Calibration:
    """Predictions beside outcomes."""

    num_drafts: int
    predicted: float
    """Mean of what was told."""
    accepted: float
    """Share that was accepted."""
    error: float
    """Expected calibration error: mean over drafts of |predicted - accepted| of their bin."""
    bins: tuple[Bin, ...]
    """Those with drafts, in order."""


@dataclass(frozen=True)
class Calibrations:
    """Both questions; the drafts are those that were verified and whose fate is known."""

    reached: Calibration
    """The draft itself, where all before it were accepted."""
    survival: Calibration
    """The block up to the draft."""


def calibrations(answers: Iterable[Decoded]) -> Calibrations | None:
    """What drafters told in `answers` against what was accepted; None where nothing was told."""
    reached: list[tuple[float, bool]] = []
    survival: list[tuple[float, bool]] = []
    for told, num_kept in _told_cycles(answers):
        reached += [(p, k < num_kept) for k, p in enumerate(told[: num_kept + 1])]
        survival += [(p, k < num_kept) for k, p in enumerate(accumulate(told, mul))]
    return Calibrations(calibrate(reached), calibrate(survival)) if reached else None


def by_bin(found: Calibrations) -> list[tuple[float, float, Bin | None, Bin | None]]:
    """Ends of the bins that have drafts; survival and reached of each."""
    survival, reached = ({one.low: one for one in each.bins} for each in (found.survival, found.reached))
    ends = {one.low: one.high for each in (survival, reached) for one in each.values()}
    return [(low, ends[low], survival.get(low), reached.get(low)) for low in sorted(ends)]


def calibrate(pairs: Sequence[tuple[float, bool]]) -> Calibration:
    """Predicted probabilities and outcomes, at least one, in bins of equal width."""
    binned: list[list[tuple[float, bool]]] = [[] for _ in range(NUM_BINS)]
    for predicted, accepted in pairs:
        binned[min(int(predicted * NUM_BINS), NUM_BINS - 1)].append((predicted, accepted))
    bins = tuple(
        Bin(place / NUM_BINS, (place + 1) / NUM_BINS, len(own), *_means(own)) for place, own in enumerate(binned) if own
    )
    gaps = sum(one.num_drafts * abs(one.predicted - one.accepted) for one in bins)
    return Calibration(len(pairs), *_means(pairs), gaps / len(pairs), bins)


def _means(pairs: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    return sum(p for p, _ in pairs) / len(pairs), sum(right for _, right in pairs) / len(pairs)


def _told_cycles(answers: Iterable[Decoded]) -> Iterator[tuple[Sequence[float], int]]:
    """What was told of the judged drafts of each cycle, and how many of them were accepted."""
    for answer in answers:
        for told, (num_kept, _) in zip(answer.confidences, judged_cycles(answer), strict=False):
            yield told, num_kept
