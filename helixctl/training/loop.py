"""The training loop: takes filled slots in order, accumulates gradients, steps, validates at step boundaries.

The same for drafters and causal LMs: what it trains is a ``Learner``.

What it never does: read data, run the target, write files (``recorder.py`` does, for lane 0).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor, nn

from helixctl.data.batch import SlotBatch
from helixctl.data.sequence import Sequence, Share
from helixctl.engine.channel import OrderedChannel
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.slots import SlotPool
from helixctl.engine.streams import Handoff, StreamContext
from helixctl.errors import HelixError
from helixctl.lm_plan import AnyPlan
from helixctl.models.drafters._terms import LossTerms
from helixctl.models.shared import SharedWeights
from helixctl.training.compiling import CompileLog
from helixctl.training.features import LeftOut, count_bad, left_out
from helixctl.training.learner import Learner
from helixctl.training.optim import StepOutcome, clear_moments, gradients, make_moments, make_optimizer, take_step
from helixctl.training.passes import TrainPass
from helixctl.training.reduce import Reducer
from helixctl.training.schedule import make_schedule
from helixctl.training.warmup import compiles

logger = logging.getLogger(__name__)


class NotFinite(HelixError):
    """The loss or the gradient norm stayed NaN or infinite."""


class Drafter(Protocol):
    """What the loop asks of a drafter's module."""

    compiles: bool
    """Set to True where what it computes shall be compiled, for every thread apart."""

    @property
    def capturable(self) -> bool:
        """Whether ``loss`` queues the same work for every micro-batch, so that a CUDA graph can hold it."""

    def loss(self, slot: SlotBatch, shared: SharedWeights) -> LossTerms:
        """Additive loss terms of one micro-batch; the numerator carries the gradient."""

    def evaluate(self, slot: SlotBatch, shared: SharedWeights) -> dict[str, Tensor]:
        """Additive metric sums of one micro-batch, full vocabulary, no gradient."""


class Observer(Protocol):
    """What lane 0 of the first process tells about its progress; the other lanes have none."""

    def restore(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        """Load the checkpoint that the run goes on from, if any; called for every lane of the process."""

    def started(self) -> None:
        """All stages are ready; training begins."""

    def stepped(self, step: int, sums: dict[str, Tensor], outcome: StepOutcome) -> None:
        """Optimizer step number ``step`` (the first is 1) was taken, or skipped (``outcome.taken``)."""

    def validated(self, sums: dict[str, Tensor], model: nn.Module, seconds: float) -> None:
        """One validation pass is complete."""

    def boundary(self, model: nn.Module, optimizer: torch.optim.AdamW, *, stopping: bool) -> None:
        """The step and its validation are over; a checkpoint may be due, and is where the run stops here."""


Restore = Callable[[nn.Module, torch.optim.AdamW], None]
"""Puts what the run begins with into a fresh model and optimizer, the same in every lane of every process."""


@dataclass(frozen=True)
class Lane:
    """What connects one drafter to the rest of the run."""

    number: int
    inbox: OrderedChannel[Handoff[SlotBatch]]
    pool: SlotPool[SlotBatch]
    slots: tuple[SlotBatch, ...]
    """The lane's own, for the warm-up."""
    reducer: Reducer
    sequence: Sequence
    share: Share
    restore: Restore
    interrupt: InterruptFlag
    stop: Callable[[], None]
    """Ends the stages in front without a failure."""
    compiled: CompileLog = field(default_factory=CompileLog)
    """Told what the warm-up compiles."""


class TrainerStage:
    """The optimizer loop on one device."""

    def __init__(
        self,
        lane: Lane,
        plan: AnyPlan,
        build: Callable[[], Learner],
        first_step: int,
        observer: Observer | None,
    ) -> None:
        self.name = f"{plan.trainer_role}-{lane.number}"
        self.device = torch.device(plan.trainer_devices[lane.number])
        self._lane = lane
        self._schedule = make_schedule(plan)
        self._lanes = lane.share.stride
        self._global_lane = lane.share.lane(lane.number)
        self._plan = plan
        self._build = build
        self._step_number = first_step
        """Optimizer steps taken; every lane counts for itself."""
        self._trained_tokens = 0
        self._observer = observer
        self._sums: dict[str, Tensor] = {}
        self._bad: list[tuple[Tensor, int, tuple[int, ...]]] = []
        self._left_out: list[LeftOut] = []
        self._num_done: dict[str, int] = {"train": 0, "validation": 0}
        self._documents: list[int] = []

    @property
    def step_number(self) -> int:
        """Optimizer steps taken so far, those before a resume included; readable from any thread."""
        return self._step_number

    @property
    def trained_tokens(self) -> int:
        """Real tokens of the micro-batches that this process trained on in this lane; readable from any thread."""
        return self._trained_tokens

    @property
    def num_done(self) -> dict[str, int]:
        """Micro-batches that this process trained and validated in this lane, by role; readable from any thread."""
        return dict(self._num_done)

    def setup(self) -> None:
        """Build what is trained and its optimizer, and restore the checkpoint."""
        self._learner = self._build()
        self._model = self._learner.module
        self._optimizer = make_optimizer(self._model, self._plan.recipe.train)
        gradients(self._optimizer)
        self._train = TrainPass(self._learner.loss, lambda: autocast(self._plan, self.device), self._plan.pass_rows)
        if compiles(self._plan, self.device):
            self._warm_up()
        with StreamContext(self.device):
            self._lane.restore(self._model, self._optimizer)

    def run(self) -> None:
        """Every micro-batch of this lane, until the last or until the user asks to stop."""
        lane = self._lane
        if self._observer is not None:
            self._observer.started()
        with StreamContext(self.device) as stream:
            for seq in self._numbers():
                slot = lane.inbox.receive(lane.number).take()
                role = lane.sequence.entry(seq).role
                with stream.named(f"{self.name} {role}"):
                    if role == "train":
                        self._accumulate(slot)
                    else:
                        self._evaluate(slot)
                self._num_done[role] += 1
                stream.done(slot)
                lane.pool.release(lane.share.place_of(seq))
                if self._finish(seq, role):
                    lane.stop()
                    return

    def _warm_up(self) -> None:
        """Compile, and hold at once all the memory that the run will ever need."""
        make_moments(self._model, self._optimizer)
        with self._lane.compiled.account(self.name), StreamContext(self.device):
            self._learner.warm_up(self._lane.slots[0], self._practise)
            if self.device.type == "cuda" and self._learner.capturable:
                self._train.capture(self._lane.slots, self.device)
            for gradient in gradients(self._optimizer):
                gradient.zero_()

    def _practise(self) -> None:
        """One training pass and one validation pass that leave no trace."""
        self._accumulate(self._lane.slots[0])
        self._sums = {}
        self._evaluate(self._lane.slots[0])
        for gradient in gradients(self._optimizer):
            gradient.zero_()
        self._sums, self._documents, self._left_out = {}, [], []
        self._trained_tokens = 0

    def rehearse(self, slots: Listed[SlotBatch]) -> None:
        """One step on filled slots, outside of a run, to see what it costs; after ``setup``."""
        for slot in slots:
            self._accumulate(slot)
        self._step()

    def teardown(self) -> None:
        """Nothing outlives the thread."""

    def _numbers(self) -> Iterator[int]:
        first = self._lane.sequence.first_seq(self._step_number)  # a multiple of the number of lanes
        return iter(range(first + self._global_lane, self._lane.sequence.total, self._lanes))

    def _accumulate(self, slot: SlotBatch) -> None:
        assert slot.batch is not None
        documents = [document for row in slot.batch.documents for document in row]
        self._documents += documents
        counts = {"tokens": slot.batch.num_tokens, "documents": len(documents)}
        # full, not tensor: that one copies from the host, and waits until the device has done so.
        filled = {name: torch.full((), float(count), device=self.device) for name, count in counts.items()}
        self._add({**self._train(slot), **filled, "bad_documents": count_bad(slot)})
        self._left_out += left_out(slot)
        self._trained_tokens += slot.batch.num_tokens

    @torch.no_grad()
    def _evaluate(self, slot: SlotBatch) -> None:
        if not self._sums:
            self._validation_started = perf_counter()
        with autocast(self._plan, self.device):
            self._add(self._learner.evaluate(slot))
        self._left_out += left_out(slot)

    def _add(self, sums: dict[str, Tensor]) -> None:
        """One launch for all: a replayed pass overwrites its sums, so they are copied or added here."""
        values = [value.detach().float() for value in sums.values()]
        if self._sums:
            torch._foreach_add_([self._sums[name] for name in sums], values)
        else:
            self._sums = dict(zip(sums, torch._foreach_mul(values, 1.0), strict=True))

    def _finish(self, seq: int, role: str) -> bool:
        """Close the step or the validation pass that ``seq`` completes; True where the run stops here."""
        sequence = self._lane.sequence
        step = sequence.step_of(seq)
        end = seq - self._global_lane + self._lanes  # every number before this one has been taken by its lane
        if role == "train" and end == sequence.seq_after_step(step):
            self._step()
        if end != sequence.first_seq(step + 1):
            return False
        if role == "validation":
            self._finish_validation()
        stopping = self._must_stop()  # asked before the boundary: all lanes stop where the first one saves
        if self._observer is not None:
            self._observer.boundary(self._model, self._optimizer, stopping=stopping)
        return stopping

    def _step(self) -> None:
        lane, options = self._lane, self._plan.recipe.train
        names = sorted(self._sums)
        lane.reducer.sum_(lane.number, [*gradients(self._optimizer), *(self._sums[n] for n in names)])
        if self._schedule.begins_fresh(self._step_number):
            clear_moments(self._optimizer)
        rate = self._schedule.learning_rate(self._step_number)
        outcome = take_step(self._optimizer, self._sums["loss_den"], rate, options.max_grad_norm)
        self._step_number += 1
        self._bad.append((outcome.finite, self._step_number, tuple(self._documents)))
        if self._observer is not None:
            self._observer.stepped(self._step_number, self._sums, outcome)
        self._sums, self._documents = {}, []
        self._check_finite()

    def _check_finite(self) -> None:
        """On a CPU after every step; on a GPU once per window, since reading a flag waits for the device."""
        limit = self._plan.recipe.train.max_bad_steps
        window = limit if self.device.type == "cpu" else max(limit, self._plan.recipe.train.log_every_steps)
        if len(self._bad) < window:
            return
        flags = [bool(finite) for finite, _, _ in self._bad]
        self._say_what_is_left_out()
        for end in range(limit, len(flags) + 1):
            if not any(flags[end - limit : end]):
                _, step, documents = self._bad[end - limit]
                raise NotFinite(
                    f"loss or gradient norm was not finite in {limit} consecutive steps, the first at step {step} "
                    f"with documents {_short(documents)}",
                    fix="lower train.learning_rate, or look at these documents with `helixctl prepare --show`",
                )
        self._bad = self._bad[len(flags) - limit + 1 :]

    def _say_what_is_left_out(self) -> None:
        documents = [document for noted in self._left_out for document in noted.names()]
        self._left_out = []
        if documents:
            logger.warning("features are not finite and left out: documents %s", _short(tuple(documents)))

    def _finish_validation(self) -> None:
        names = sorted(self._sums)
        self._lane.reducer.sum_(self._lane.number, [self._sums[n] for n in names])
        if self._observer is not None:
            self._observer.validated(self._sums, self._model, perf_counter() - self._validation_started)
        self._sums = {}

    def _must_stop(self) -> bool:
        return self._lane.reducer.any(self._lane.number, self._lane.interrupt.requested)


def autocast(plan: AnyPlan, device: torch.device) -> torch.autocast:
    """The plan's compute precision for a forward of what is trained; its parameters stay float32.

    The cache of cast weights is the process's, and whoever leaves autocast empties it for all threads: with several
    drafters the same step was rounded in different ways, by chance (a gradient norm of 2.17053, then 2.17057).
    """
    alone = len(plan.trainer_devices) == 1
    on = plan.compute_dtype == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=on, cache_enabled=alone)


def _short(documents: tuple[int, ...], limit: int = 12) -> str:
    shown = ", ".join(str(d) for d in documents[:limit])
    return shown + (f" and {len(documents) - limit} more" if len(documents) > limit else "")
