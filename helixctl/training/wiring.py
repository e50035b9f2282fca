"""What the pipelines of all kinds of training have in common: control, slots and channels, and who watches the stages.

``build.py`` puts the stages of a drafter on it, ``lm_build.py`` those of a causal LM.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from helixctl.data.batch import SlotBatch
from helixctl.data.sequence import Sequence, Share
from helixctl.engine.channel import Channel, OrderedChannel
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.slots import SlotPool
from helixctl.engine.stage import Stage
from helixctl.engine.stats import Link, PipelineStats, take_stats
from helixctl.engine.status import EVERY_S
from helixctl.engine.streams import Handoff
from helixctl.engine.supervisor import Limits, Progress, Supervisor
from helixctl.lm_plan import AnyPlan
from helixctl.training.compiling import CompileLog
from helixctl.training.loop import Lane, Observer, Restore, TrainerStage
from helixctl.training.optim import make_moments, optimizer_tensors
from helixctl.training.processes import OneProcess, Processes, ProcessGroup
from helixctl.training.reduce import ProcessDrafters, Reducer, SingleDrafter
from helixctl.training.stages import NumberSource, TargetEnds, Work
from helixctl.training.state import num_steps
from helixctl.training.warmup import forbid_recompiling

WORK_AHEAD = 2
"""Micro-batches that may wait between readers and targets, and between a target and its postprocess thread."""


def make_sequence(plan: AnyPlan) -> Sequence:
    """The order of training and validation micro-batches of the whole run."""
    return Sequence(plan.batches_per_step, num_steps(plan), plan.recipe.validation.every_steps, plan.validation_batches)


@dataclass(frozen=True)
class Control:
    """What reaches every part of a run: the wish to stop, the sign of life that is watched, the other processes."""

    interrupt: InterruptFlag
    progress: Progress
    processes: Processes = field(default_factory=OneProcess)
    status_every_s: float = EVERY_S
    """How often the run says what it is doing."""
    compiled: CompileLog = field(default_factory=CompileLog)
    """Filled by what the stages compile."""
    only_warm_up: bool = False
    """End with ``WarmedUp`` where the gate would open."""


class WarmedUp(Exception):
    """Every stage is set up, and nothing more was asked for."""


@dataclass(frozen=True)
class Wires:
    """What connects the stages of a run."""

    sequence: Sequence
    share: Share
    numbers: NumberSource
    slots: SlotPool[SlotBatch]
    own_slots: tuple[tuple[SlotBatch, ...], ...]
    """The slots of every drafter."""
    work: Channel[Work]
    ends: tuple[TargetEnds, ...]
    """Between target i and its postprocess thread."""
    lanes: OrderedChannel[Handoff[SlotBatch]]
    reducer: Reducer

    @property
    def channels(self) -> tuple[Channel[Any] | OrderedChannel[Any], ...]:
        """All channels, upstream first."""
        return (self.work, *(ends.out for ends in self.ends), self.lanes)

    def lane(self, number: int, control: Control, restore: Restore) -> Lane:
        """What drafter ``number`` needs of them."""
        return Lane(
            number=number,
            inbox=self.lanes,
            pool=self.slots,
            slots=self.own_slots[number],
            reducer=self.reducer,
            sequence=self.sequence,
            share=self.share,
            restore=restore,
            interrupt=control.interrupt,
            stop=self.stop,
            compiled=control.compiled,
        )

    def stop(self) -> None:
        """End the stages in front of the drafters without a failure."""
        self.slots.cancel()
        for channel in (*self.channels, *(ends.read for ends in self.ends)):
            channel.cancel()


@dataclass(frozen=True)
class Pipeline:
    """A run ready to start, and what its accounting reads afterwards."""

    supervisor: Supervisor
    wires: Wires
    drafters: tuple[TrainerStage, ...]
    links: tuple[Link, ...]
    """The channels with the stages at their ends, upstream first."""

    def stats(self) -> PipelineStats:
        """Counts, waits and occupancy so far; callable from any thread while the pipeline runs."""
        return take_stats(self.supervisor, self.links, self.wires.slots)


def supervise(plan: AnyPlan, groups: Listed[Listed[Stage]], wires: Wires, control: Control) -> Supervisor:
    """Runs the stages of ``groups``, which are set up in this order; everything that waits can be cancelled."""
    options = plan.recipe.pipeline
    meetings = [wires.reducer.meeting] if isinstance(wires.reducer, ProcessDrafters) else []
    others = [control.processes] if isinstance(control.processes, ProcessGroup) else []
    return Supervisor(
        groups,
        [wires.slots, *wires.channels, *(ends.read for ends in wires.ends), *meetings, *others],
        Limits(start_timeout_s=options.start_timeout_s, stall_timeout_s=options.stall_timeout_s),
        progress=control.progress,
        interrupt=control.interrupt,
        on_open=lambda: _all_ready(plan, control),
    )


def _all_ready(plan: AnyPlan, control: Control) -> None:
    control.compiled.say()
    if control.only_warm_up:
        raise WarmedUp
    control.processes.gather(None)  # the stall timeout counts from here, however long another process needed
    forbid_recompiling(plan)


def restorer(observer: Observer | None, processes: Processes, *, resumed: bool) -> Restore:
    """The first process reads the checkpoint for every lane, the others get what it read."""

    def restore(model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        if observer is not None:
            observer.restore(model, optimizer)
        elif resumed:
            make_moments(model, optimizer)
        processes.copy_from_first([*model.state_dict().values(), *optimizer_tensors(model, optimizer).values()])

    return restore


def make_wires(
    plan: AnyPlan,
    first_step: int,
    processes: Processes,
    build_slot: Callable[[torch.device], SlotBatch],
    ends: tuple[TargetEnds, ...] = (),
) -> Wires:
    """Slots on every training device, and the channels to them; without targets one stage fills all slots."""
    sequence = make_sequence(plan)
    share = Share(len(plan.trainer_devices), plan.world.size, plan.world.rank)
    first = share.place_of(sequence.first_seq(first_step))
    buffers = [[build_slot(torch.device(d)) for _ in range(plan.num_slots)] for d in plan.trainer_devices]
    slots = SlotPool("slots", buffers, first_seq=first)
    num_fillers, num_trainers = max(1, len(ends)), len(plan.trainer_devices)
    return Wires(
        sequence=sequence,
        share=share,
        numbers=NumberSource(first, share.place_of(sequence.total), slots),
        slots=slots,
        own_slots=tuple(tuple(own) for own in buffers),
        work=Channel("work", WORK_AHEAD * num_fillers, num_senders=plan.recipe.pipeline.readers),
        ends=ends,
        # Room for every slot: targets take work in any order, so none may wait for a number behind its own.
        lanes=OrderedChannel(
            "features" if ends else "batches",
            slots.num_slots,
            num_lanes=num_trainers,
            first_seq=first,
            num_senders=num_fillers,
        ),
        reducer=ProcessDrafters(num_trainers, processes) if num_trainers > 1 else SingleDrafter(processes),
    )
