"""The run's one sequence of micro-batches, by arithmetic: which number trains, which number validates.

Steps are numbered from 0. Every step is ``batches_per_step`` consecutive training numbers; after every
``validate_every_steps`` steps, and after the last step, stands one validation pass of ``validation_batches`` numbers.
Nothing here holds state, so readers, drafters, processes and a resumed run agree without talking to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Entry(NamedTuple):
    """What one number of the sequence is."""

    role: Literal["train", "validation"]
    place: int
    """Training: place among all training micro-batches of the run. Validation: place within its pass."""


@dataclass(frozen=True)
class Sequence:
    """Order of training and validation micro-batches; no passes where one of the validation numbers is 0."""

    batches_per_step: int
    total_steps: int
    validate_every_steps: int = 0
    validation_batches: int = 0

    def __post_init__(self) -> None:
        """Reject numbers that name no sequence (ValueError: the plan computes them, so this is a bug)."""
        if self.batches_per_step < 1 or self.total_steps < 0:
            raise ValueError(f"no sequence has {self.batches_per_step} batches per step and {self.total_steps} steps")
        if self.validate_every_steps < 0 or self.validation_batches < 0:
            raise ValueError("validation numbers cannot be negative")

    @property
    def total(self) -> int:
        """Micro-batches of the whole run, training and validation together."""
        return self.first_seq(self.total_steps)

    @property
    def total_passes(self) -> int:
        """Validation passes of the whole run."""
        return self._passes_before(self.total_steps)

    def entry(self, seq: int) -> Entry:
        """Role and place of number ``seq``, 0 <= seq < total.

        Raises:
            IndexError: ``seq`` is outside of the run.
        """
        if not 0 <= seq < self.total:
            raise IndexError(f"micro-batch {seq} is outside of a run of {self.total}")
        if not self._validates:
            return Entry("train", seq)
        last_pass = self.seq_after_step(self.total_steps - 1)
        if seq >= last_pass:
            return Entry("validation", seq - last_pass)
        train_batches = self.validate_every_steps * self.batches_per_step
        period, place = divmod(seq, train_batches + self.validation_batches)
        if place < train_batches:
            return Entry("train", period * train_batches + place)
        return Entry("validation", place - train_batches)

    def step_of(self, seq: int) -> int:
        """The step that number ``seq`` belongs to; for a validation number, the step that its pass follows."""
        entry = self.entry(seq)
        if entry.role == "train":
            return entry.place // self.batches_per_step
        before = self.entry(seq - entry.place - 1)
        return before.place // self.batches_per_step

    def validates_after(self, step: int) -> bool:
        """True when a validation pass stands after ``step``."""
        done = step + 1
        return self._validates and (done % self.validate_every_steps == 0 or done == self.total_steps)

    def first_seq(self, step: int) -> int:
        """First training number of ``step``, behind the pass of the step before; ``total`` for ``total_steps``."""
        return step * self.batches_per_step + self._passes_before(step) * self.validation_batches

    def seq_after_step(self, step: int) -> int:
        """The number behind the last training number of ``step``: where its validation pass begins, if it has one."""
        return self.first_seq(step) + self.batches_per_step

    @property
    def _validates(self) -> bool:
        return self.validate_every_steps > 0 and self.validation_batches > 0 and self.total_steps > 0

    def _passes_before(self, step: int) -> int:
        if not self._validates:
            return 0
        regular, rest = divmod(step, self.validate_every_steps)
        return regular + (1 if rest and step == self.total_steps else 0)


@dataclass(frozen=True)
class Share:
    """The numbers of the sequence that one of several processes works on.

    All processes have M drafters each. Number s belongs to drafter s mod (processes x M), counted through all of them;
    the drafters of process r are r x M to r x M + M - 1. A process counts its own numbers 0, 1, 2, ... ("places");
    with one process a place is the number itself. Steps and validation passes begin at multiples of processes x M, so
    every process has the same number of places in each.
    """

    num_drafters: int
    """M, of one process."""
    num_processes: int = 1
    rank: int = 0

    @property
    def stride(self) -> int:
        """Drafters of all processes together."""
        return self.num_processes * self.num_drafters

    def lane(self, drafter: int) -> int:
        """Place of this process's ``drafter`` among those of all processes."""
        return self.rank * self.num_drafters + drafter

    def seq_at(self, place: int) -> int:
        """The number at ``place``."""
        turn, drafter = divmod(place, self.num_drafters)
        return turn * self.stride + self.lane(drafter)

    def place_of(self, seq: int) -> int:
        """The place of number ``seq``, which must be this process's own; also of a number where a step begins."""
        turn, lane = divmod(seq, self.stride)
        return turn * self.num_drafters + (lane - self.lane(0) if lane else 0)
