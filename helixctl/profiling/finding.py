"""What a rule says, and how sure it can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["high", "moderate", "note"]


@dataclass(frozen=True)
class Thresholds:
    """Borders between little, moderate and high. Those of waits are TensorFlow's profiler's: 5 and 20 %."""

    moderate: float = 0.05
    high: float = 0.20
    busy: float = 0.80
    """A stage with work and room for this share of the time is at its limit."""
    close: float = 0.10
    """Stages whose busy shares are this close limit together."""
    gil: float = 0.85
    """The GIL is held this much: Python code takes turns."""
    gil_own: float = 0.70
    """The limiting stage alone holds it this much: it is Python code that limits."""
    gil_switches_per_s: float = 100.0
    """Waiters for the GIL wake up every 5 ms; this many voluntary switches betray them without stacks."""
    launch: float = 0.15
    launch_moderate: float = 0.03
    sync: float = 0.15
    alloc: float = 0.05
    copy: float = 0.15
    gpu_full_pct: float = 90.0
    gpu_free_pct: float = 80.0
    link: float = 0.70
    """Of what a PCIe link can carry."""
    min_seconds: float = 10.0
    min_ticks: int = 200
    max_errors: float = 0.05
    max_slowdown: float = 0.10
    """Loss of speed under the profiler that makes a profile worthless."""
    profiler_share: float = 0.02
    """Of the machine's cores; a profiler that takes less did not cause a loss."""
    headroom: float = 0.60
    """On a core or ready for one for this share of the time: computing."""


DEFAULTS = Thresholds()


@dataclass(frozen=True)
class Finding:
    """One rule that fired."""

    code: str
    """V0 to V8, with a letter for the cause."""
    title: str
    level: Level
    numbers: dict[str, float | int | str]
    """What it rests on; names that end in ``_share`` are shares of the time."""
    advice: str
    detail: tuple[str, ...] = ()
    """Places in the code, lines of a dump, what could not be told."""


@dataclass(frozen=True)
class Verdict:
    """The headline, what causes it, and everything else that fired."""

    headline: Finding
    cause: Finding | None
    findings: tuple[Finding, ...]
    """All of them, the headline first."""
    confidence: Literal["good", "fair", "poor"]
    basis: str
    """What the confidence rests on: seconds, looks, errors."""
    unknown: tuple[str, ...] = field(default=())
    """What the data cannot tell, and what would."""

    @property
    def title(self) -> str:
        """The headline with its cause."""
        return f"{self.headline.title}, {self.cause.title}" if self.cause is not None else self.headline.title

    @property
    def has_failed(self) -> bool:
        """The profiled process failed or hangs."""
        return self.headline.code == "V8"
