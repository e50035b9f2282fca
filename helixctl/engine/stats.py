"""What a running pipeline says about itself: plain numbers, cheap to take, from any thread.

All counts and seconds go up from the start of the run; whoever looks twice takes the difference. Not here: who writes
them down (``training/status.py``) and what they mean (``profiling/``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helixctl.engine.channel import Channel, ChannelStats, OrderedChannel
from helixctl.engine.slots import SlotPool, SlotStats
from helixctl.engine.supervisor import StageState, Supervisor
from helixctl.engine.waiting import Waiter


@dataclass(frozen=True)
class Link:
    """A channel and the stages at its two ends, by name."""

    channel: Channel[Any] | OrderedChannel[Any]
    senders: tuple[str, ...]
    receivers: tuple[str, ...]


@dataclass(frozen=True)
class LinkStats:
    """What went through a channel, and between whom."""

    channel: ChannelStats
    senders: tuple[str, ...]
    receivers: tuple[str, ...]


@dataclass(frozen=True)
class PipelineStats:
    """One look at a pipeline."""

    at_s: float
    """Instant, on the supervisor's clock (``time.monotonic``: the same for every process of this machine)."""
    stages: tuple[StageState, ...]
    links: tuple[LinkStats, ...]
    """Upstream first."""
    slots: SlotStats | None
    waiters: tuple[Waiter, ...]
    """Who waits now, and for what."""


def take_stats(supervisor: Supervisor, links: Sequence[Link], slots: SlotPool[Any] | None) -> PipelineStats:
    """Look at everything once; each part is consistent in itself, one after the other."""
    rooms = [link.channel.room for link in links] + ([slots.room] if slots is not None else [])
    return PipelineStats(
        at_s=supervisor.clock(),
        stages=supervisor.stages(),
        links=tuple(LinkStats(link.channel.stats(), link.senders, link.receivers) for link in links),
        slots=None if slots is None else slots.stats(),
        waiters=tuple(waiter for room in rooms for waiter in room.waiters()),
    )
