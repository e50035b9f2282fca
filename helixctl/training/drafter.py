"""The drafter stage: takes filled slots in order, accumulates gradients, steps, validates at step boundaries.

What it never does: read data, run the target, write files (``recorder.py`` does, for lane 0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from helixctl.data.batch import SlotBatch
from helixctl.data.sequence import Sequence
from helixctl.engine.channel import OrderedChannel
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.slots import SlotPool
from helixctl.engine.streams import Handoff, StreamContext
from helixctl.errors import HelixError
from helixctl.models.drafters._terms import LossTerms
from helixctl.models.shared import SharedWeights
from helixctl.plan import Plan
from helixctl.training.optim import StepOutcome, gradients, learning_rate_scale, make_optimizer, take_step
from helixctl.training.reduce import Reducer
from helixctl.training.state import num_steps
from helixctl.training.warmup import compiles, warm_up_drafter


class NotFinite(HelixError):
    """The loss or the gradient norm stayed NaN or infinite."""


class Drafter(Protocol):
    """What the loop asks of a drafter's module."""

    def loss(self, slot: SlotBatch, shared: SharedWeights) -> LossTerms:
        """Additive loss terms of one micro-batch; the numerator carries the gradient."""

    def evaluate(self, slot: SlotBatch, shared: SharedWeights) -> dict[str, Tensor]:
        """Additive metric sums of one micro-batch, full vocabulary, no gradient."""


class Observer(Protocol):
    """What lane 0 tells about its progress; the other lanes have none."""

    def restore(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        """Load the checkpoint that the run goes on from, if any."""

    def started(self) -> None:
        """All stages are ready; training begins."""

    def stepped(self, step: int, sums: dict[str, Tensor], outcome: StepOutcome) -> None:
        """Optimizer step number ``step`` (the first is 1) was taken, or skipped where it was not finite."""

    def validated(self, sums: dict[str, Tensor], model: nn.Module, seconds: float) -> None:
        """One validation pass is complete."""

    def boundary(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        """The step and its validation are over; a checkpoint may be due."""


@dataclass(frozen=True)
class Lane:
    """What connects one drafter to the rest of the run."""

    number: int
    inbox: OrderedChannel[Handoff[SlotBatch]]
    pool: SlotPool[SlotBatch]
    slot: SlotBatch
    """One of the lane's own slots, for the warm-up."""
    reducer: Reducer
    sequence: Sequence
    interrupt: InterruptFlag
    stop: Callable[[], None]
    """Ends the stages in front without a failure."""


class DrafterStage:
    """The optimizer loop of one drafter."""

    def __init__(
        self,
        lane: Lane,
        plan: Plan,
        build: Callable[[], tuple[nn.Module, SharedWeights]],
        first_step: int,
        observer: Observer | None,
    ) -> None:
        self.name = f"drafter-{lane.number}"
        self.device = torch.device(plan.drafter_devices[lane.number])
        self._lane = lane
        self._num_steps = num_steps(plan)
        self._lanes = len(plan.drafter_devices)
        self._plan = plan
        self._build = build
        self._step_number = first_step
        """Optimizer steps taken; every lane counts for itself."""
        self._trained_tokens = 0
        self._observer = observer
        self._sums: dict[str, Tensor] = {}
        self._bad: list[tuple[Tensor, int, tuple[int, ...]]] = []
        self._documents: list[int] = []

    @property
    def step_number(self) -> int:
        """Optimizer steps taken so far, those before a resume included; readable from any thread."""
        return self._step_number

    @property
    def trained_tokens(self) -> int:
        """Real tokens of the micro-batches that this process trained on in this lane; readable from any thread."""
        return self._trained_tokens

    def setup(self) -> None:
        """Build the drafter and its optimizer, and restore the checkpoint."""
        self._model, self._shared = self._build()
        self._drafter = cast(Drafter, self._model)
        self._optimizer = make_optimizer(self._model, self._plan.recipe.train)
        gradients(self._optimizer)
        if compiles(self.device):
            with StreamContext(self.device):
                warm_up_drafter(self._lane.slot, self._plan, self._practise)
        if self._observer is not None:
            self._observer.restore(self._model, self._optimizer)

    def run(self) -> None:
        """Every micro-batch of this lane, until the last or until the user asks to stop."""
        lane = self._lane
        if self._observer is not None:
            self._observer.started()
        with StreamContext(self.device) as stream:
            for seq in self._numbers():
                slot = lane.inbox.receive(lane.number).take()
                role = lane.sequence.entry(seq).role
                if role == "train":
                    self._accumulate(slot)
                else:
                    self._evaluate(slot)
                stream.done(slot)
                lane.pool.release(seq)
                if self._finish(seq, role) and self._must_stop():
                    lane.stop()
                    return

    def _practise(self) -> None:
        """One training pass and one validation pass that leave no trace."""
        self._accumulate(self._lane.slot)
        self._evaluate(self._lane.slot)
        for gradient in gradients(self._optimizer):
            gradient.zero_()
        self._sums, self._documents = {}, []

    def teardown(self) -> None:
        """Nothing outlives the thread."""

    def _numbers(self) -> Iterator[int]:
        first = self._lane.sequence.first_seq(self._step_number)  # a multiple of the number of lanes
        return iter(range(first + self._lane.number, self._lane.sequence.total, self._lanes))

    def _accumulate(self, slot: SlotBatch) -> None:
        with autocast(self._plan, self.device):
            terms = self._drafter.loss(slot, self._shared)
        terms.numerator.backward()
        self._add({"loss_num": terms.numerator.detach(), "loss_den": terms.denominator, **terms.sums})
        assert slot.batch is not None
        self._documents += [document for row in slot.batch.documents for document in row]
        self._add({"tokens": torch.tensor(float(slot.batch.num_tokens), device=self.device)})
        self._trained_tokens += slot.batch.num_tokens

    @torch.no_grad()
    def _evaluate(self, slot: SlotBatch) -> None:
        if not self._sums:
            self._validation_started = perf_counter()
        with autocast(self._plan, self.device):
            self._add(self._drafter.evaluate(slot, self._shared))

    def _add(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            held = self._sums.get(name)
            self._sums[name] = value.detach().float().clone() if held is None else held.add_(value.detach())

    def _finish(self, seq: int, role: str) -> bool:
        """Close the step or the validation pass that ``seq`` completes; True where a step is wholly over."""
        sequence = self._lane.sequence
        step = sequence.step_of(seq)
        end = seq - self._lane.number + self._lanes  # every number before this one has been taken by its lane
        if role == "train" and end == sequence.seq_after_step(step):
            self._step()
        if end != sequence.first_seq(step + 1):
            return False
        if role == "validation":
            self._finish_validation()
        if self._observer is not None:
            self._observer.boundary(self._model, self._optimizer)
        return True

    def _step(self) -> None:
        lane, options = self._lane, self._plan.recipe.train
        names = sorted(self._sums)
        lane.reducer.sum_(lane.number, [*gradients(self._optimizer), *(self._sums[n] for n in names)])
        scale = learning_rate_scale(self._step_number, self._num_steps, options)
        rate = options.learning_rate * scale
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
        for end in range(limit, len(flags) + 1):
            if not any(flags[end - limit : end]):
                _, step, documents = self._bad[end - limit]
                raise NotFinite(
                    f"loss or gradient norm was not finite in {limit} consecutive steps, the first at step {step} "
                    f"with documents {_short(documents)}",
                    fix="lower train.learning_rate, or look at these documents with `helixctl prepare --show`",
                )
        self._bad = self._bad[len(flags) - limit + 1 :]

    def _finish_validation(self) -> None:
        names = sorted(self._sums)
        self._lane.reducer.sum_(self._lane.number, [self._sums[n] for n in names])
        if self._observer is not None:
            self._observer.validated(self._sums, self._model, perf_counter() - self._validation_started)
        self._sums = {}

    def _must_stop(self) -> bool:
        return self._lane.reducer.any(self._lane.number, self._lane.interrupt.requested)


def autocast(plan: Plan, device: torch.device) -> torch.autocast:
    """The plan's compute precision for a drafter's forward; its parameters stay float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=plan.compute_dtype == "bfloat16")


def _short(documents: tuple[int, ...], limit: int = 12) -> str:
    shown = ", ".join(str(d) for d in documents[:limit])
    return shown + (f" and {len(documents) - limit} more" if len(documents) > limit else "")
