"""Meeting point of several stages: all bring a value, one combines, all leave with the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from helixctl.engine.waiting import WaitRoom

V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True)
class MeetingStats:
    """What happened at a meeting point so far."""

    name: str
    size: int
    rounds: int
    wait_s: float
    """Seconds waited for others and for the result, added over ranks; waits that go on now are included."""


class Meeting(Generic[V, R]):
    """A barrier of ``size`` ranks with an action, usable round after round; every rank comes to every round.

    The action runs in rank 0's thread whoever comes last, so device contexts and collectives stay in one thread.
    """

    def __init__(self, name: str, size: int) -> None:
        if size < 1:
            raise ValueError(f"size={size} must be positive")
        self.name = name
        self.room = WaitRoom(name)
        self._values: list[V | None] = [None] * size
        self._arrived = [0] * size  # rounds each rank came to
        self._rounds = 0  # rounds with a result
        self._result: R | None = None

    def meet(self, rank: int, value: V, combine: Callable[[Sequence[V]], R]) -> R:
        """Bring ``value``, wait for all, and return ``combine(values)``, the values in the order of the ranks.

        Only rank 0's ``combine`` is called, without the lock held. A rank that returns knows that ``combine`` is over.

        Raises:
            Cancelled: the meeting has been cancelled, or ``combine`` raised in rank 0.
            BaseException: rank 0 gets what ``combine`` raised.
        """
        with self.room:
            self.room.check()
            self._values[rank] = value
            self._arrived[rank] += 1
            current = self._arrived[rank]
            self.room.moved()
            if rank != 0:
                self.room.wait_until(lambda: self._rounds >= current, f"for others at {self.name!r}", "meet")
                return self._result  # type: ignore[return-value]  # set: the round has a result
            self.room.wait_until(lambda: min(self._arrived) >= current, f"for others at {self.name!r}", "meet")
        return self._lead(combine)

    def _lead(self, combine: Callable[[Sequence[V]], R]) -> R:
        try:
            result = combine(tuple(self._values))  # type: ignore[arg-type]  # all have arrived
        except BaseException:
            self.cancel()
            raise
        with self.room:
            self._values = [None] * len(self._values)
            self._result = result
            self._rounds += 1
            self.room.moved()
        return result

    def cancel(self) -> None:
        """Give up: everybody who waits here, or comes later, gets ``Cancelled``."""
        self.room.cancel()

    def stats(self) -> MeetingStats:
        """Counts and seconds so far."""
        with self.room:
            return MeetingStats(self.name, len(self._values), self._rounds, self.room.waited_s("meet"))
