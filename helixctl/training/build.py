"""Wires a plan into stages: the only place that knows them all.

Drafters are set up first, then targets, then readers; see ``engine.supervisor`` for the order and for failures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from helixctl.data.batch import MicroBatch, SlotBatch
from helixctl.data.loader import BatchLoader, LoaderOptions
from helixctl.data.sequence import Sequence, Share
from helixctl.data.store import Store
from helixctl.engine.channel import Channel
from helixctl.engine.stage import Stage
from helixctl.engine.stats import Link
from helixctl.models.drafters._parts import belongs
from helixctl.models.features import OUTPUT_SETS
from helixctl.models.shared import SharedWeights
from helixctl.models.target import Target
from helixctl.plan import Plan
from helixctl.plugins import DRAFTERS, load_plugin
from helixctl.training.feature_cache import CachedFeatures, CachedRows, FeatureSource, WithLastHidden, make_layout
from helixctl.training.learner import DrafterLearner, Learner
from helixctl.training.loop import Observer, TrainerStage
from helixctl.training.processes import Processes
from helixctl.training.published import load_into, open_for
from helixctl.training.stages import PostStage, ReaderStage, TargetEnds, TargetStage, make_slot
from helixctl.training.state import TrainState
from helixctl.training.stored import StoredFeatures, feature_key, refuse_other_weights
from helixctl.training.warmup import made_up_batch, warm_up_target
from helixctl.training.wiring import WORK_AHEAD, Control, Pipeline, Wires, make_wires, restorer, supervise


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
                self._loaded[device] = load_target(_with_compiling(self._plan, device), device)
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


def _with_compiling(plan: Plan, device: str) -> Plan:
    """The plan whose target compiles as `compile.mode` wants it on ``device``."""
    mode = plan.recipe.compile.mode
    if mode == "auto" or plan.recipe.target.compile == "off":
        return plan
    target = plan.recipe.target.model_copy(update={"compile": mode})
    return replace(plan, recipe=plan.recipe.model_copy(update={"target": target}))


def load_target(plan: Plan, device: str, dtype: str | None = None) -> Target:
    """The frozen target with the plan's taps, in the plan's precision unless another is asked for."""
    kind, span = getattr(torch, dtype or plan.target_dtype), [torch.device(name) for name in plan.span_of(device)]
    return Target.load(plan.recipe.target, plan.target_layer_ids, torch.device(device), kind, span)


def load_exact_target(plan: Plan, device: str) -> Target:
    """The target in the precision in which rounding changes no token.

    That is float32, or float64 with float8 products: a state that is one bit off there may be rounded to another of the
    eight bits, which is a percent of it.
    """
    if plan.float8 is None:
        return load_target(plan, device, "float32")
    target = plan.recipe.target.model_copy(update={"attention": "segments"})  # flex knows no float64
    return load_target(replace(plan, recipe=plan.recipe.model_copy(update={"target": target})), device, "float64")


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


def build_pipeline(
    plan: Plan, store: Store | None, state: TrainState, observer: Observer | None, control: Control, targets: Targets
) -> Pipeline:
    """Channels, slots and stages for N targets and M drafters; only the first process has an observer.

    Without a store there are no readers: enough for a warm-up.
    """
    wires = _make_wires(plan, state.step, control.processes)
    restore = restorer(observer, control.processes, resumed=state.step > 0)
    drafters = [
        TrainerStage(
            wires.lane(lane, control, restore),
            plan,
            _builder(plan, targets, lane),
            state.step,
            observer if lane == 0 else None,
        )
        for lane in range(len(plan.drafter_devices))
    ]
    middle: list[Stage] = []
    options = plan.recipe.pipeline
    for i, (device, ends) in enumerate(zip(plan.target_devices, wires.ends, strict=True)):
        account = partial(control.compiled.account, f"target-{i}")
        load = feature_loader(plan, store, targets, device, account)
        middle.append(TargetStage(f"target-{i}", load, plan.target_layer_ids, wires.work, ends))
        middle.append(PostStage(f"target-{i}-post", torch.device(device), ends, wires.lanes, options.transport))
    readers = _build_readers(plan, store, wires)
    supervisor = supervise(plan, [drafters, middle, readers], wires, control)
    return Pipeline(supervisor, wires, tuple(drafters), _links(wires, len(readers), len(drafters)))


def _links(wires: Wires, num_readers: int, num_drafters: int) -> tuple[Link, ...]:
    """Who sends to whom, by the stages' names."""
    numbers = range(len(wires.ends))
    targets = tuple(f"target-{i}" for i in numbers)
    posts = tuple(f"target-{i}-post" for i in numbers)
    return (
        Link(wires.work, tuple(f"reader-{i}" for i in range(num_readers)), targets),
        *(Link(wires.ends[i].out, targets[i : i + 1], posts[i : i + 1]) for i in numbers),
        Link(wires.lanes, posts, tuple(f"drafter-{j}" for j in range(num_drafters))),
    )


def _make_wires(plan: Plan, first_step: int, processes: Processes) -> Wires:
    ends = tuple(
        TargetEnds(Channel(f"target-{i}-out", WORK_AHEAD), Channel(f"target-{i}-read", OUTPUT_SETS))
        for i in range(len(plan.target_devices))
    )
    return make_wires(plan, first_step, processes, partial(make_slot_for, plan), ends)


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


def _build_readers(plan: Plan, store: Store | None, wires: Wires) -> list[ReaderStage]:
    if store is None:
        return []
    batch_at = _batch_source(plan, make_loader(plan, store, wires.sequence), wires.share)
    numbers = range(plan.recipe.pipeline.readers)
    return [ReaderStage(f"reader-{i}", wires.numbers, batch_at, wires.work) for i in numbers]


def _batch_source(plan: Plan, loader: BatchLoader, share: Share) -> Callable[[int], MicroBatch]:
    """Makes the micro-batch of a place; for GPUs in pinned memory, whose copies hold nobody up."""
    if all(torch.device(device).type == "cpu" for device in (*plan.target_devices, *plan.drafter_devices)):
        return lambda place: loader.batch(share.seq_at(place))
    return lambda place: loader.batch(share.seq_at(place)).pinned()


def make_slot_for(plan: Plan, device: torch.device) -> SlotBatch:
    """One slot of the plan's shapes on ``device``."""
    recipe = plan.recipe
    shape = (recipe.train.micro_batch_rows, recipe.data.seq_len, recipe.drafter.num_anchors)
    dtype = getattr(torch, plan.target_dtype)
    slot = make_slot(shape, len(plan.captured_layers), plan.target.hidden_size, device, dtype)
    if plan.last_hidden:
        slot.last_hidden = slot.features.pop()
    return slot


def feature_loader(
    plan: Plan, store: Store | None, targets: Targets, device: str, account: Callable[[], AbstractContextManager[None]]
) -> Callable[[], FeatureSource]:
    """What a target stage loads in its set-up; ``account`` surrounds what compiles."""

    def load() -> FeatureSource:
        if (folder := plan.recipe.target.features) is not None:
            assert store is not None
            return StoredFeatures(folder, feature_key(plan, store), store, torch.device(device))
        target = targets.on(device)
        with account():
            fixed = target.fixed(made_up_batch(plan), last_hidden=plan.last_hidden)
            if fixed is None:
                warm_up_target(target, plan)
        cache_bytes = plan.recipe.target.feature_cache_mib << 20
        if fixed is not None:
            return _cached_rows(plan, store, fixed, cache_bytes) if cache_bytes and store is not None else fixed
        source = WithLastHidden(target) if plan.last_hidden else target
        return CachedFeatures(source, cache_bytes) if cache_bytes else source

    return load


def _cached_rows(plan: Plan, store: Store, source: FeatureSource, cache_bytes: int) -> CachedRows:
    """A cache of at most ``cache_bytes``, all of them allocated now."""
    assert plan.train_documents is not None, "there is a store"
    loader = make_loader(plan, store, Sequence(1, plan.train_documents))  # an epoch has no more micro-batches
    shape, dtype = (len(plan.captured_layers), plan.target.hidden_size), getattr(torch, plan.target_dtype)
    layout = make_layout(loader.first_epoch(), cache_bytes // (shape[0] * shape[1] * dtype.itemsize))
    kept = torch.zeros((shape[0], layout.num_tokens, shape[1]), dtype=dtype, device=source.device).unbind()
    on_gpu = source.device.type == "cuda"
    return CachedRows(source, lambda i: loader.batch(i).pinned() if on_gpu else loader.batch(i), layout, kept)


def _builder(plan: Plan, targets: Targets, lane: int) -> Callable[[], Learner]:
    device = plan.drafter_devices[lane]

    def build() -> Learner:
        layers, shared = targets.lend(device)
        model = build_drafter(plan, torch.device(device))
        plugin: Any = drafter_plugin(plan)
        plugin.initialise(model, layers, shared)
        start = plan.recipe.drafter.init_from
        if start is not None:
            load_into(model, open_for(plan, start, starts=True))
        return DrafterLearner(plan, model, shared)

    return build
