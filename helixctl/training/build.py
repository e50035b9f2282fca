"""Wires a plan into stages: the only place that knows them all.

Drafters are set up first, then targets, then readers; see ``engine.supervisor`` for the order and for failures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from helixctl.data.batch import SlotBatch
from helixctl.data.loader import BatchLoader, LoaderOptions
from helixctl.data.sequence import Sequence, Share
from helixctl.data.store import Store
from helixctl.engine.channel import Channel, OrderedChannel
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.slots import SlotPool
from helixctl.engine.stage import Stage
from helixctl.engine.stats import Link, PipelineStats, take_stats
from helixctl.engine.status import EVERY_S
from helixctl.engine.streams import Handoff
from helixctl.engine.supervisor import Limits, Progress, Supervisor
from helixctl.models.drafters._parts import belongs
from helixctl.models.shared import SharedWeights
from helixctl.models.target import Target
from helixctl.plan import Plan
from helixctl.plugins import DRAFTERS, load_plugin
from helixctl.training.drafter import DrafterStage, Lane, Observer, Restore
from helixctl.training.feature_cache import CachedFeatures, FeatureSource, WithLastHidden
from helixctl.training.optim import make_moments, optimizer_tensors
from helixctl.training.processes import OneProcess, Processes, ProcessGroup
from helixctl.training.published import load_into, open_for
from helixctl.training.reduce import ProcessDrafters, Reducer, SingleDrafter
from helixctl.training.stages import Captured, NumberSource, PostStage, ReaderStage, TargetStage, Work, make_slot
from helixctl.training.state import TrainState, num_steps
from helixctl.training.stored import StoredFeatures, feature_key, refuse_other_weights
from helixctl.training.warmup import forbid_recompiling, warm_up_target

WORK_AHEAD = 2
"""Micro-batches that may wait between readers and targets, and between a target and its postprocess thread."""


class Targets:
    """Loads the target once per device, whoever asks first."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._loaded: dict[str, Target] = {}
        self._lock = threading.Lock()

    def on(self, device: str) -> Target:
        """The target on ``device``, loaded at the first call."""
        with self._lock:
            if device not in self._loaded:
                self._loaded[device] = load_target(self._plan, device)
            return self._loaded[device]

    def nearest(self, device: str) -> Target:
        """The target on ``device`` where one runs there, else the first."""
        return self.on(device if device in self._plan.target_devices else self._plan.target_devices[0])

    def shared_on(self, device: str) -> SharedWeights:
        """Embedding, head and final norm on ``device``; the target's own tensors where it lives there."""
        target = self.nearest(device)
        return target.shared if target.device == torch.device(device) else target.shared.to(torch.device(device))

    def lend(self, device: str) -> tuple[nn.ModuleList, SharedWeights]:
        """The target's layers, and its shared weights on ``device``, for a new drafter.

        Where features are stored, the target is loaded on the CPU for this alone, and not kept.

        Raises:
            DataError: the stored features are those of other weights.
        """
        features = self._plan.recipe.target.features
        if features is None:
            return self.nearest(device).layers, self.shared_on(device)
        options = self._plan.recipe.target.model_copy(update={"attention": "segments"})
        dtype = getattr(torch, self._plan.target_dtype)
        target = Target.load(options, self._plan.target_layer_ids, "cpu", dtype)
        refuse_other_weights(features, target.model)
        return target.layers, target.shared.to(torch.device(device))


def load_target(plan: Plan, device: str, dtype: str | None = None) -> Target:
    """The frozen target with the plan's taps, in the plan's precision unless another is asked for."""
    kind, span = getattr(torch, dtype or plan.target_dtype), [torch.device(name) for name in plan.span_of(device)]
    return Target.load(plan.recipe.target, plan.target_layer_ids, torch.device(device), kind, span)


def drafter_plugin(plan: Plan) -> ModuleType:
    """The plug-in module of the recipe's algorithm."""
    return load_plugin(DRAFTERS, plan.recipe.drafter.algorithm, "plugin")


def build_drafter(plan: Plan, device: torch.device) -> nn.Module:
    """A fresh drafter with float32 masters on ``device``, its initial weights a function of the seed alone.

    Parts that the recipe freezes need no gradient.
    """
    plugin: Any = drafter_plugin(plan)
    model: nn.Module = plugin.build(plan.recipe.drafter, plan.target, plan.target_layer_ids, plan.recipe.run.seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not belongs(name, plan.recipe.drafter.freeze))
    return model.to(device)


def make_sequence(plan: Plan) -> Sequence:
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


@dataclass(frozen=True)
class Wires:
    """What connects the stages of a run."""

    sequence: Sequence
    share: Share
    numbers: NumberSource
    slots: SlotPool[SlotBatch]
    first_slots: tuple[SlotBatch, ...]
    """One slot of every drafter."""
    work: Channel[Work]
    captured: tuple[Channel[Captured], ...]
    """Target i to its postprocess thread."""
    lanes: OrderedChannel[Handoff[SlotBatch]]
    reducer: Reducer

    @property
    def channels(self) -> tuple[Channel[Any] | OrderedChannel[Any], ...]:
        """All channels, upstream first."""
        return (self.work, *self.captured, self.lanes)

    def lane(self, number: int, control: Control, restore: Restore) -> Lane:
        """What drafter ``number`` needs of them."""
        return Lane(
            number=number,
            inbox=self.lanes,
            pool=self.slots,
            slot=self.first_slots[number],
            reducer=self.reducer,
            sequence=self.sequence,
            share=self.share,
            restore=restore,
            interrupt=control.interrupt,
            stop=self.stop,
        )

    def stop(self) -> None:
        """End the stages in front of the drafters without a failure."""
        self.slots.cancel()
        for channel in self.channels:
            channel.cancel()


@dataclass(frozen=True)
class Pipeline:
    """A run ready to start, and what its accounting reads afterwards."""

    supervisor: Supervisor
    wires: Wires
    drafters: tuple[DrafterStage, ...]
    links: tuple[Link, ...]
    """The channels with the stages at their ends, upstream first."""

    def stats(self) -> PipelineStats:
        """Counts, waits and occupancy so far; callable from any thread while the pipeline runs."""
        return take_stats(self.supervisor, self.links, self.wires.slots)


def build_pipeline(
    plan: Plan, store: Store, state: TrainState, observer: Observer | None, control: Control, targets: Targets
) -> Pipeline:
    """Channels, slots and stages for N targets and M drafters; only the first process has an observer."""
    wires = _make_wires(plan, state.step, control.processes)
    loader = make_loader(plan, store, wires.sequence)
    restore = _restorer(observer, control.processes, resumed=state.step > 0)
    drafters = [
        DrafterStage(
            wires.lane(lane, control, restore),
            plan,
            _builder(plan, targets, lane),
            state.step,
            observer if lane == 0 else None,
        )
        for lane in range(len(plan.drafter_devices))
    ]
    middle: list[Stage] = []
    for i, (device, outbox) in enumerate(zip(plan.target_devices, wires.captured, strict=True)):
        load, taps = _loader(plan, store, targets, device), plan.target_layer_ids
        middle.append(TargetStage(f"target-{i}", load, taps, wires.work, outbox))
        middle.append(PostStage(f"target-{i}-post", torch.device(device), outbox, wires.lanes))
    options = plan.recipe.pipeline
    seq_at = wires.share.seq_at
    readers = [
        ReaderStage(f"reader-{i}", wires.numbers, lambda place: loader.batch(seq_at(place)), wires.work)
        for i in range(options.readers)
    ]
    meetings = [wires.reducer.meeting] if isinstance(wires.reducer, ProcessDrafters) else []
    others = [control.processes] if isinstance(control.processes, ProcessGroup) else []
    supervisor = Supervisor(
        [drafters, middle, readers],
        [wires.slots, *wires.channels, *meetings, *others],
        Limits(start_timeout_s=options.start_timeout_s, stall_timeout_s=options.stall_timeout_s),
        progress=control.progress,
        interrupt=control.interrupt,
        on_open=lambda: _all_ready(plan, control.processes),
    )
    return Pipeline(supervisor, wires, tuple(drafters), _links(wires, len(readers), len(drafters)))


def _all_ready(plan: Plan, processes: Processes) -> None:
    processes.gather(None)  # the stall timeout counts from here, however long another process needed to get ready
    forbid_recompiling(plan)


def _restorer(observer: Observer | None, processes: Processes, *, resumed: bool) -> Restore:
    """The first process reads the checkpoint for every lane, the others get what it read."""

    def restore(model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        if observer is not None:
            observer.restore(model, optimizer)
        elif resumed:
            make_moments(model, optimizer)
        processes.copy_from_first([*model.state_dict().values(), *optimizer_tensors(model, optimizer).values()])

    return restore


def _links(wires: Wires, num_readers: int, num_drafters: int) -> tuple[Link, ...]:
    """Who sends to whom, by the stages' names."""
    numbers = range(len(wires.captured))
    targets = tuple(f"target-{i}" for i in numbers)
    posts = tuple(f"target-{i}-post" for i in numbers)
    return (
        Link(wires.work, tuple(f"reader-{i}" for i in range(num_readers)), targets),
        *(Link(wires.captured[i], targets[i : i + 1], posts[i : i + 1]) for i in numbers),
        Link(wires.lanes, posts, tuple(f"drafter-{j}" for j in range(num_drafters))),
    )


def _make_wires(plan: Plan, first_step: int, processes: Processes) -> Wires:
    sequence = make_sequence(plan)
    share = Share(len(plan.drafter_devices), plan.world.size, plan.world.rank)
    first = share.place_of(sequence.first_seq(first_step))
    buffers = [[make_slot_for(plan, torch.device(d)) for _ in range(plan.num_slots)] for d in plan.drafter_devices]
    slots = SlotPool("slots", buffers, first_seq=first)
    num_targets, num_drafters = len(plan.target_devices), len(plan.drafter_devices)
    return Wires(
        sequence=sequence,
        share=share,
        numbers=NumberSource(first, share.place_of(sequence.total), slots),
        slots=slots,
        first_slots=tuple(own[0] for own in buffers),
        work=Channel("work", WORK_AHEAD * num_targets, num_senders=plan.recipe.pipeline.readers),
        captured=tuple(Channel(f"target-{i}-out", WORK_AHEAD) for i in range(num_targets)),
        # Room for every slot: targets take work in any order, so none may wait for a number behind its own.
        lanes=OrderedChannel(
            "features", slots.num_slots, num_lanes=num_drafters, first_seq=first, num_senders=num_targets
        ),
        reducer=ProcessDrafters(num_drafters, processes) if num_drafters > 1 else SingleDrafter(processes),
    )


def make_loader(plan: Plan, store: Store, sequence: Sequence) -> BatchLoader:
    """The reader's view of the store: micro-batches as a pure function of their number."""
    recipe = plan.recipe
    options = LoaderOptions(
        seed=recipe.run.seed,
        seq_len=recipe.data.seq_len,
        rows=recipe.train.micro_batch_rows,
        num_anchors=recipe.drafter.num_anchors,
        anchors_per_document=recipe.drafter.anchors_per_document,
        packing=plan.packing,
        pad_id=plan.target.pad_token_ids[0] if plan.target.pad_token_ids else 0,
        curriculum=recipe.data.curriculum,
    )
    return BatchLoader(store.split("train"), store.split("validation"), sequence, options)


def make_slot_for(plan: Plan, device: torch.device) -> SlotBatch:
    """One slot of the plan's shapes on ``device``."""
    recipe = plan.recipe
    shape = (recipe.train.micro_batch_rows, recipe.data.seq_len, recipe.drafter.num_anchors)
    dtype = getattr(torch, plan.target_dtype)
    slot = make_slot(shape, len(plan.captured_layers), plan.target.hidden_size, device, dtype)
    if plan.last_hidden:
        slot.last_hidden = slot.features.pop()
    return slot


def _loader(plan: Plan, store: Store, targets: Targets, device: str) -> Callable[[], FeatureSource]:
    def load() -> FeatureSource:
        if (folder := plan.recipe.target.features) is not None:
            return StoredFeatures(folder, feature_key(plan, store), store, torch.device(device))
        target = targets.on(device)
        warm_up_target(target, plan)
        cache_mib = plan.recipe.target.feature_cache_mib
        source = WithLastHidden(target) if plan.last_hidden else target
        return CachedFeatures(source, cache_mib << 20) if cache_mib else source

    return load


def _builder(plan: Plan, targets: Targets, lane: int) -> Callable[[], tuple[nn.Module, SharedWeights]]:
    device = plan.drafter_devices[lane]

    def build() -> tuple[nn.Module, SharedWeights]:
        layers, shared = targets.lend(device)
        model = build_drafter(plan, torch.device(device))
        plugin: Any = drafter_plugin(plan)
        plugin.initialise(model, layers, shared)
        start = plan.recipe.drafter.init_from
        if start is not None:
            load_into(model, open_for(plan, start, starts=True))
        return model, shared

    return build
