"""Slot pool: persistent buffers owned by drafters, lent out in the order of the micro-batches' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from helixctl.engine.waiting import WaitRoom

S = TypeVar("S")


@dataclass(frozen=True)
class SlotStats:
    """What a pool lent so far."""

    name: str
    num_slots: int
    acquired: int
    released: int
    wait_s: float
    """Seconds waited for a slot, added over readers; waits that go on now are included."""


class SlotPool(Generic[S]):
    """Lends slots in sequence order: number s goes to drafter s mod M, slot (s div M) mod n of its n slots.

    The reader takes the slot when it dispatches a number, so the oldest untrained number always owns its slot. The
    naive rule, a target takes any free slot of the drafter when it has *finished* a number, hangs: with 3 targets, one
    drafter and 2 slots, the targets that work on numbers 1 and 2 finish first and hold both slots; number 0 finds none,
    and the drafter, who must have number 0 first, gives none back.

    Args:
        name: shown in statistics and when somebody waits for too long.
        slots: ``slots[j]`` are the slots of drafter j, at least one.
        first_seq: the first number; a resumed run does not begin at 0.
    """

    def __init__(self, name: str, slots: Sequence[Sequence[S]], *, first_seq: int = 0) -> None:
        if not slots or not all(slots):
            raise ValueError(f"every drafter needs at least one slot, got {[len(own) for own in slots]}")
        self.name = name
        self.room = WaitRoom(name)
        self._slots = tuple(tuple(own) for own in slots)
        self._first_seq = first_seq
        self._next_seq = first_seq
        self._lent: dict[tuple[int, int], int] = {}  # (drafter, place) -> number that holds it
        self._released = 0

    @property
    def num_slots(self) -> int:
        """Slots of all drafters together: the most micro-batches in flight."""
        return sum(len(own) for own in self._slots)

    def acquire(self, seq: int) -> S:
        """The slot of number ``seq``; waits until all smaller numbers have got theirs and this slot is free.

        Readers may ask in any order, each number once; ``seq`` of a later number never overtakes.

        Raises:
            Cancelled: the pool has been cancelled.
            ValueError: ``seq`` was acquired before, or lies before the first number (a bug).
        """
        drafter, place = self._place(seq)
        with self.room:
            if seq < self._next_seq:
                raise ValueError(f"number {seq} was acquired twice from {self.name!r}, or lies before its first")
            self.room.wait_until(
                lambda: seq == self._next_seq and (drafter, place) not in self._lent,
                f"for a slot of {self.name!r} (number {seq}, drafter {drafter})",
                "acquire",
            )
            self._lent[drafter, place] = seq
            self._next_seq += 1
            self.room.moved()
        return self._slots[drafter][place]

    def release(self, seq: int) -> None:
        """Give the slot of number ``seq`` back. Harmless after ``cancel()``.

        Raises:
            ValueError: ``seq`` does not hold its slot (a bug).
        """
        where = self._place(seq)
        with self.room:
            if self._lent.get(where) != seq:
                raise ValueError(f"number {seq} holds no slot of {self.name!r}")
            del self._lent[where]
            self._released += 1
            self.room.passed()
            self.room.moved()

    def cancel(self) -> None:
        """Give up: everybody who waits here, or comes later, gets ``Cancelled``."""
        self.room.cancel()

    def stats(self) -> SlotStats:
        """Counts and seconds so far."""
        with self.room:
            return SlotStats(
                name=self.name,
                num_slots=self.num_slots,
                acquired=self._next_seq - self._first_seq,
                released=self._released,
                wait_s=self.room.waited_s("acquire"),
            )

    def _place(self, seq: int) -> tuple[int, int]:
        drafter = seq % len(self._slots)
        return drafter, seq // len(self._slots) % len(self._slots[drafter])
