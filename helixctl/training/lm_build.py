"""Wires the plan of a causal LM into stages: readers, one thread that fills slots, training loops.

    reader --work--> filler --batches--> trainer

The readers make micro-batches from the stores by their number; see ``wiring.py`` for what all kinds have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from helixctl.data.batch import MicroBatch, SlotBatch
from helixctl.data.lm_loader import StageWindows, WindowLoader
from helixctl.data.sequence import Sequence, Share
from helixctl.data.window_count import WindowSource, make_windows
from helixctl.engine.channel import Channel, OrderedChannel
from helixctl.engine.stats import Link
from helixctl.engine.streams import Handoff, StreamContext
from helixctl.errors import DataError
from helixctl.lm_plan import CausalLMPlan
from helixctl.models.causal_lm import CausalLM, build_causal_lm, check_packing
from helixctl.models.drafters._terms import LossTerms
from helixctl.recipe.causal_lm import stage_data
from helixctl.training.loop import Observer, TrainerStage
from helixctl.training.stages import ReaderStage, Work, fill_slot, make_slot
from helixctl.training.state import TrainState
from helixctl.training.warmup import compiles, run_passes
from helixctl.training.wiring import Control, Pipeline, make_wires, restorer, supervise

FILLER = "filler"


class FillStage:
    """Copies micro-batches into slots, off the readers' and the trainers' path."""

    def __init__(self, inbox: Channel[Work], outbox: OrderedChannel[Handoff[SlotBatch]]) -> None:
        self.name = FILLER
        self._inbox = inbox
        self._outbox = outbox

    def setup(self) -> None:
        """Nothing to load."""

    def run(self) -> None:
        """Until the readers are done."""
        for work in self._inbox:
            slot = work.slot
            with StreamContext(slot.input_ids.device) as stream, stream.named(self.name):
                stream.reuse(slot)
                fill_slot(slot, work.batch, ())
                self._outbox.send(work.place, stream.handoff(slot))
        self._outbox.close()

    def teardown(self) -> None:
        """Nothing to release."""


class LMLearner:
    """A causal LM as the training loop sees it."""

    def __init__(self, plan: CausalLMPlan, lm: CausalLM) -> None:
        self._plan = plan
        self._lm = lm
        self.capturable = False
        """Attention masks are made on the host, for every micro-batch anew."""

    @property
    def module(self) -> nn.Module:
        """See ``Learner``."""
        return self._lm.module

    def loss(self, slot: SlotBatch) -> LossTerms:
        """See ``Learner``."""
        return self._lm.loss(slot)

    def evaluate(self, slot: SlotBatch) -> dict[str, Tensor]:
        """See ``Learner``."""
        return self._lm.evaluate(slot)

    def warm_up(self, slot: SlotBatch, passes: Callable[[], None]) -> None:
        """See ``Learner``."""
        fill_slot(slot, made_up_windows(self._plan), ())
        run_passes(slot, passes)


def build_lm_pipeline(plan: CausalLMPlan, state: TrainState, observer: Observer | None, control: Control) -> Pipeline:
    """Channels, slots and stages; only the first process has an observer. A warm-up has no readers.

    Raises:
        DataError: a store that is missing or torn, or fills no window.
    """
    wires = make_wires(plan, state.step, control.processes, partial(make_lm_slot, plan))
    restore = restorer(observer, control.processes, resumed=state.step > 0)
    trainers = [
        TrainerStage(
            wires.lane(lane, control, restore),
            plan,
            partial(_build_learner, plan, torch.device(device)),
            state.step,
            observer if lane == 0 else None,
        )
        for lane, device in enumerate(plan.trainer_devices)
    ]
    readers: list[ReaderStage] = []
    if not control.only_warm_up:
        batch_at = _batch_source(plan, make_lm_loader(plan, wires.sequence), wires.share)
        numbers = range(plan.recipe.pipeline.readers)
        readers = [ReaderStage(f"reader-{i}", wires.numbers, batch_at, wires.work) for i in numbers]
    supervisor = supervise(plan, [trainers, [FillStage(wires.work, wires.lanes)], readers], wires, control)
    links = (
        Link(wires.work, tuple(reader.name for reader in readers), (FILLER,)),
        Link(wires.lanes, (FILLER,), tuple(trainer.name for trainer in trainers)),
    )
    return Pipeline(supervisor, wires, tuple(trainers), links)


def build_lm(plan: CausalLMPlan, device: torch.device, *, compiled: bool) -> CausalLM:
    """The model at the beginning of a run, on ``device``.

    Raises:
        ModelError: it cannot be built, or cannot keep packed documents apart.
    """
    options = plan.recipe.model
    model = build_causal_lm(options, plan.recipe.run.seed)
    check_packing(model, plan.recipe.data.packing)
    return CausalLM(model.to(device), plan.model, options, compiled=compiled)


def make_lm_loader(plan: CausalLMPlan, sequence: Sequence) -> WindowLoader:
    """The readers' view of the stores: micro-batches as a pure function of their number.

    Raises:
        DataError: a store that is missing or torn, or fills no window.
    """
    recipe, rows = plan.recipe, plan.recipe.train.micro_batch_rows
    stages = []
    for i, stage in enumerate(plan.stages):
        source = WindowSource(stage_data(recipe, i), rows, recipe.run.seed, i)
        train = make_windows(source, "train")
        if train is None or stage.first_step is None:
            raise DataError(f"the documents of {source.data.store} fill no window", fix="run `helixctl prepare` again")
        stages.append(StageWindows(stage.first_step, train, make_windows(source, "validation")))
    return WindowLoader(stages, sequence, rows)


def make_lm_slot(plan: CausalLMPlan, device: torch.device) -> SlotBatch:
    """One slot of the plan's shapes on ``device``: no features, no anchors."""
    recipe = plan.recipe
    shape = (recipe.train.micro_batch_rows, recipe.data.seq_len, 0)
    return make_slot(shape, 0, plan.model.hidden_size, device, torch.float32)


def made_up_windows(plan: CausalLMPlan) -> MicroBatch:
    """Rows of two documents (one where rows are not packed), all of it to be learnt."""
    rows, tokens = plan.recipe.train.micro_batch_rows, plan.recipe.data.seq_len
    half = tokens // 2 if plan.recipe.data.packing == "continuous" else tokens
    spans = tuple((start, min(start + half, tokens)) for start in range(0, tokens, half))
    positions = torch.cat([torch.arange(end - start) for start, end in spans])
    documents = torch.cat([torch.full((end - start,), i, dtype=torch.int32) for i, (start, end) in enumerate(spans)])
    generator = torch.Generator().manual_seed(0)
    none = torch.zeros((rows, 0), dtype=torch.int64)
    return MicroBatch(
        seq=0,
        role="train",
        index=0,
        epoch=0,
        input_ids=torch.randint(plan.model.vocab_size, (rows, tokens), generator=generator),
        position_ids=positions.expand(rows, -1).clone(),
        document_ids=documents.expand(rows, -1).clone(),
        loss_mask=torch.ones((rows, tokens), dtype=torch.bool),
        anchors=none,
        anchor_valid=none.bool(),
        documents=tuple(tuple(range(len(spans))) for _ in range(rows)),
        spans=tuple(spans for _ in range(rows)),
    )


def _build_learner(plan: CausalLMPlan, device: torch.device) -> LMLearner:
    # Compiled layers attend by flex, which has no backward on a CPU.
    return LMLearner(plan, build_lm(plan, device, compiled=compiles(plan, device) and device.type != "cpu"))


def _batch_source(plan: CausalLMPlan, loader: WindowLoader, share: Share) -> Callable[[int], MicroBatch]:
    """Makes the micro-batch of a place; for GPUs in pinned memory, whose copies hold nobody up."""
    if all(device == "cpu" for device in plan.devices):
        return lambda place: loader.batch(share.seq_at(place))
    return lambda place: loader.batch(share.seq_at(place)).pinned()
