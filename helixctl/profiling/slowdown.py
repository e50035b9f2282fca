"""What profiling costs the run: its speed in the window against its speed right before, with the error of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from helixctl.profiling.pipeline import Status
from helixctl.profiling.recording import Recording

_BIN_S = 0.5
_MIN_BINS = 3


@dataclass(frozen=True)
class Slowdown:
    """A loss of speed; negative where the run was faster under the profiler."""

    tokens_per_s_before: float
    share: float
    error_share: float
    """Standard error of ``share``, from how much the speed varies by itself."""


def find_slowdown(seen: Recording) -> Slowdown | None:
    """None where the stretch before the window was too short to tell."""
    before = _rates([status for status in seen.statuses if status["at_s"] <= seen.window_at])
    during = _rates([status for status in seen.window_statuses if status["at_s"] >= seen.window_at])
    if len(before) < _MIN_BINS or len(during) < _MIN_BINS or not fmean(before) or not fmean(during):
        return None
    ratio = fmean(during) / fmean(before)
    return Slowdown(fmean(before), 1 - ratio, ratio * math.hypot(_error(before), _error(during)))


def _rates(statuses: Sequence[Status]) -> list[float]:
    """Tokens per second of neighbouring stretches of time."""
    rates: list[float] = []
    first = statuses[0] if statuses else None
    for status in statuses[1:]:
        assert first is not None
        seconds = status["at_s"] - first["at_s"]
        if seconds >= _BIN_S:
            tokens = [one["counters"].get("trained_tokens", 0) for one in (first, status)]
            rates.append((tokens[1] - tokens[0]) / seconds)
            first = status
    return rates


def _error(rates: Sequence[float]) -> float:
    """Relative standard error of the mean."""
    return stdev(rates) / math.sqrt(len(rates)) / fmean(rates)
