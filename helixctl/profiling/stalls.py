"""Stalls: stretches in which the pipeline delivers next to nothing although it is faster otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from helixctl.profiling import pipeline
from helixctl.profiling.pipeline import Status

_ITEMS_PER_BIN = 4
"""Fewer expected items than this per stretch of time, and a gap is chance."""
_STALLED = 0.2
"""Of the usual speed."""
_MIN_BINS = 6


@dataclass(frozen=True)
class Stalls:
    """What was found in a window."""

    count: int
    share: float
    """Time stalled, of the window."""
    mean_s: float
    every_s: float | None
    """Mean distance between the beginnings of stalls; None where there is one only."""
    role: str | None
    """The kind of stage that was neither starved nor held back meanwhile."""
    busy_share: float
    """How much of the stalled time that kind of stage had work and room."""


def find_stalls(statuses: Sequence[Status], roles: Sequence[tuple[str, tuple[str, ...]]]) -> Stalls | None:
    """Stalls between the statuses of a window; None where the statuses are too few or too far apart to tell."""
    bins = _bins(statuses)
    if len(bins) < _MIN_BINS or not roles:
        return None
    rates = [_rate(first, last) for first, last in bins]
    usual = sorted(rates)[3 * len(rates) // 4]
    if usual <= 0:
        return None
    stalled = [rate < _STALLED * usual for rate in rates]
    starts = [i for i, now in enumerate(stalled) if now and (i == 0 or not stalled[i - 1])]
    lost = [one for one, is_stalled in zip(bins, stalled, strict=True) if is_stalled]
    if not lost:
        return Stalls(0, 0.0, 0.0, None, None, 0.0)
    lost_s = sum(_seconds(one) for one in lost)
    instants = [bins[i][0]["at_s"] for i in starts]
    role, busy_share = _culprit(lost, roles)
    return Stalls(
        count=len(starts),
        share=lost_s / (bins[-1][1]["at_s"] - bins[0][0]["at_s"]),
        mean_s=lost_s / len(starts),
        every_s=fmean(later - earlier for earlier, later in pairwise(instants)) if len(instants) > 1 else None,
        role=role,
        busy_share=busy_share,
    )


def _bins(statuses: Sequence[Status]) -> list[tuple[Status, Status]]:
    """Neighbouring statuses, merged until a few items are expected between two of them."""
    if len(statuses) < 2:
        return []
    rate = _rate(statuses[0], statuses[-1])
    if rate <= 0:
        return []
    bins, first = [], statuses[0]
    for status in statuses[1:]:
        if (status["at_s"] - first["at_s"]) * rate >= _ITEMS_PER_BIN:
            bins.append((first, status))
            first = status
    return bins


def _culprit(
    lost: Sequence[tuple[Status, Status]], roles: Sequence[tuple[str, tuple[str, ...]]]
) -> tuple[str | None, float]:
    busy_s = dict.fromkeys((role for role, _ in roles), 0.0)
    for first, last in lost:
        for flow in pipeline.flows(pipeline.use_between(first, last), roles):
            busy_s[flow.role] += flow.busy_share * _seconds((first, last))
    role = max(busy_s, key=lambda name: busy_s[name])
    return role, busy_s[role] / sum(map(_seconds, lost))


def _rate(first: Status, last: Status) -> float:
    received = [status["links"][-1]["channel"]["received"] if status["links"] else 0 for status in (first, last)]
    return float((received[1] - received[0]) / max(_seconds((first, last)), 1e-9))


def _seconds(one: tuple[Status, Status]) -> float:
    return float(one[1]["at_s"] - one[0]["at_s"])
