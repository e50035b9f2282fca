"""The machine around a process: load of the cores, and whether a container's quota throttles it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from helixctl import cgroups


@dataclass(frozen=True)
class HostReading:
    """Counters of the machine at one instant."""

    load: float
    """Mean number of threads that run or want to, over the last minute."""
    busy_ticks: int
    """Of all cores since boot."""
    steal_ticks: int
    """Time that the hypervisor gave to others."""
    total_ticks: int
    throttled_us: int | None
    """Time that the container's quota kept its threads off the cores; None where there is no quota."""


@dataclass(frozen=True)
class HostUse:
    """The machine between two readings; shares are of all cores."""

    num_cores: int
    busy_share: float
    steal_share: float
    throttled_share: float
    load: float


def read_host(pid: int, root: Path = Path("/")) -> HostReading:
    """Look at the machine, and at the quota of the container that ``pid`` lives in."""
    words = _text(root / "proc/stat").partition("\n")[0].split()[1:]
    ticks = [int(word) for word in words[:8]] + [0] * (8 - len(words[:8]))
    load = _text(root / "proc/loadavg").split()
    idle = ticks[3] + ticks[4]
    total = sum(ticks)
    return HostReading(
        load=float(load[0]) if load else 0.0,
        busy_ticks=total - idle,
        steal_ticks=ticks[7],
        total_ticks=total,
        throttled_us=cgroups.throttled_us(root, pid),
    )


def host_between(first: HostReading, last: HostReading, seconds: float) -> HostUse:
    """What the machine did in between."""
    total = max(last.total_ticks - first.total_ticks, 1)
    throttled_us = (last.throttled_us or 0) - (first.throttled_us or 0)
    return HostUse(
        num_cores=os.cpu_count() or 1,
        busy_share=(last.busy_ticks - first.busy_ticks) / total,
        steal_share=(last.steal_ticks - first.steal_ticks) / total,
        throttled_share=throttled_us / 1e6 / max(seconds, 1e-9),
        load=last.load,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
