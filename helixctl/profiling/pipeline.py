"""The pipeline's own account, read from ``status.json`` of a run: channels, slots, stages, tokens.

Two readings give shares of the time between them. Waits are those of threads: a channel with two receivers that both
wait all the time has a receive share of 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixctl.engine.status import FILE_NAME, SCHEMA
from helixctl.profiling.owners import Crew

Status = dict[str, Any]
"""One reading of the file; its form is that of ``engine/status.py``."""


class StatusReader:
    """Reads the status of one process, each writing of it once."""

    def __init__(self, run_dir: Path, pid: int) -> None:
        self._path = run_dir / FILE_NAME
        self._pid = pid
        self._seen_at: float | None = None
        self.latest: Status | None = None

    def read(self) -> Status | None:
        """The status if it has been written since the last call, else None."""
        try:
            content: Any = json.loads(self._path.read_bytes())
        except (OSError, ValueError):  # not there yet
            return None
        if not isinstance(content, dict) or content.get("schema") != SCHEMA or content.get("pid") != self._pid:
            return None  # what an earlier run left, or another version of helixctl
        if content["at_s"] == self._seen_at and content["phase"] == "running":
            return None
        self._seen_at = content["at_s"]
        self.latest = content
        return content


def crew_of(status: Status | None) -> Crew:
    """Stages, their threads, and the devices of the drafters."""
    if status is None:
        return Crew()
    stages = status["stages"]
    return Crew(
        stages=tuple(stage["name"] for stage in stages),
        by_thread_id={stage["thread_id"]: stage["name"] for stage in stages if stage["thread_id"] is not None},
        devices=status["counters"].get("devices", {}),
    )


def is_open(status: Status) -> bool:
    """True once every stage runs, or has run."""
    return all(stage["state"] in ("running", "ended") for stage in status["stages"])


@dataclass(frozen=True)
class ChannelUse:
    """What went on at a channel between two readings; shares are of the time, per thread for waits."""

    name: str
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    capacity: int
    items_per_s: float
    received: int
    mean_held: float
    """Items held on average."""
    empty_share: float
    full_share: float
    send_wait_share: float
    receive_wait_share: float
    send_wait_s: float
    """Seconds, added over senders."""
    receive_wait_s: float
    held: int
    """Items held at the end."""


@dataclass(frozen=True)
class PipelineUse:
    """The pipeline between two readings."""

    seconds: float
    channels: tuple[ChannelUse, ...]
    slot_wait_s: float
    """Seconds that readers waited for a slot, added over readers."""
    num_slots: int
    free_slots_share: float
    """Slots not lent at the end."""
    steps_per_s: float
    tokens_per_s: float
    status_cost_share: float
    """Share of one core that writing the status took."""


def use_between(first: Status, last: Status) -> PipelineUse:
    """What happened from ``first`` to ``last``."""
    seconds = max(last["at_s"] - first["at_s"], 1e-9)
    before = {link["channel"]["name"]: link for link in first["links"]}
    slots, old_slots, counters, old = last["slots"], first["slots"], last["counters"], first["counters"]
    return PipelineUse(
        seconds=seconds,
        channels=tuple(
            _channel(before[link["channel"]["name"]], link, seconds)
            for link in last["links"]
            if link["channel"]["name"] in before
        ),
        slot_wait_s=slots["wait_s"] - old_slots["wait_s"] if slots and old_slots else 0.0,
        num_slots=slots["num_slots"] if slots else 0,
        free_slots_share=1 - (slots["acquired"] - slots["released"]) / slots["num_slots"] if slots else 1.0,
        steps_per_s=(counters.get("step", 0) - old.get("step", 0)) / seconds,
        tokens_per_s=(counters.get("trained_tokens", 0) - old.get("trained_tokens", 0)) / seconds,
        status_cost_share=(last["spent_s"] - first["spent_s"]) / seconds,
    )


def _channel(first: Status, last: Status, seconds: float) -> ChannelUse:
    old, new = first["channel"], last["channel"]
    # Every look at a channel settles how long it has held what it holds; before the first item nothing is counted.
    levels = [now - then for now, then in zip(new["occupancy"], old["occupancy"], strict=True)]
    levels[0] += max(seconds - sum(levels), 0.0)
    total = sum(levels)
    send_s = new["send_wait_s"] - old["send_wait_s"]
    receive_s = new["receive_wait_s"] - old["receive_wait_s"]
    return ChannelUse(
        name=new["name"],
        senders=tuple(last["senders"]),
        receivers=tuple(last["receivers"]),
        capacity=new["capacity"],
        items_per_s=(new["received"] - old["received"]) / seconds,
        received=new["received"] - old["received"],
        mean_held=sum(i * level for i, level in enumerate(levels)) / total,
        empty_share=levels[0] / total,
        full_share=levels[-1] / total,
        send_wait_share=min(send_s / (seconds * len(last["senders"])), 1.0),
        receive_wait_share=min(receive_s / (seconds * len(last["receivers"])), 1.0),
        send_wait_s=send_s,
        receive_wait_s=receive_s,
        held=new["sent"] - new["received"],
    )


@dataclass(frozen=True)
class StageFlow:
    """One kind of stage between two readings, over all its threads."""

    role: str
    stages: tuple[str, ...]
    in_wait_share: float
    """Time that its threads waited for work (starved)."""
    out_wait_share: float
    """Time that its threads waited for room or for a slot (held back)."""
    items_per_s: float
    """What it took, or for the first stage what it gave."""

    @property
    def busy_share(self) -> float:
        """The rest: the stage had work and room."""
        return max(1.0 - self.in_wait_share - self.out_wait_share, 0.0)


def flows(use: PipelineUse, roles: Iterable[tuple[str, tuple[str, ...]]]) -> tuple[StageFlow, ...]:
    """Waits of every kind of stage: ``roles`` holds the stages of each role, upstream first."""
    found = []
    for place, (role, stages) in enumerate(roles):
        inbound = [channel for channel in use.channels if set(channel.receivers) & set(stages)]
        outbound = [channel for channel in use.channels if set(channel.senders) & set(stages)]
        thread_s = use.seconds * len(stages)
        out_s = sum(channel.send_wait_s for channel in outbound) + (use.slot_wait_s if place == 0 else 0.0)
        in_s = sum(channel.receive_wait_s for channel in inbound)
        found.append(
            StageFlow(
                role=role,
                stages=stages,
                in_wait_share=min(in_s / thread_s, 1.0),
                out_wait_share=min(out_s / thread_s, 1.0),
                items_per_s=sum(channel.items_per_s for channel in inbound or outbound),
            )
        )
    return tuple(found)
