"""How threads wait for each other: every wait can be cancelled, is timed, and says who waits for what.

Channels, slot pools, meetings and the gate each own one ``WaitRoom``. Not here: what they wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

Clock = Callable[[], float]
"""Seconds that never go back; only differences mean something."""


class Cancelled(BaseException):
    """The run is being given up; leave ``run()`` by letting this pass.

    Not an ``Exception``, so that ``except Exception`` in a stage cannot swallow it.
    """


@dataclass(frozen=True)
class Waiter:
    """A thread that waits now."""

    thread: str
    """Name of the thread, which is the name of its stage."""
    action: str
    """What it waits for, such as ``to receive from 'features'``."""
    waited_s: float

    def __str__(self) -> str:
        return f"{self.thread} has waited {self.waited_s:.0f} s {self.action}"


@dataclass
class _Wait:
    thread: str
    action: str
    side: str
    started_at: float


class WaitRoom:
    """One lock, its waiters, and when something last moved.

    Enter it (``with room:``) to hold the lock. ``wait_until``, ``check`` and ``moved`` need the lock held; the other
    methods take it themselves.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = time.monotonic
        """The supervisor that watches this room puts its own clock here, so that instants can be compared."""
        self._condition = threading.Condition(threading.Lock())
        self._cancelled = False
        self._waits: dict[int, _Wait] = {}
        self._waited_s: dict[str, float] = {}
        self._start_s: dict[str, float] | None = None
        self._moved_at: float | None = None

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *_: object) -> None:
        self._condition.release()

    @property
    def moved_at(self) -> float | None:
        """Instant of the last ``moved()``, on ``clock``; None if nothing has moved yet."""
        return self._moved_at

    def check(self) -> None:
        """Raises ``Cancelled`` if the room has been cancelled."""
        if self._cancelled:
            raise Cancelled(f"{self.name!r} was cancelled")

    def wait_until(self, ready: Callable[[], bool], action: str, side: str) -> None:
        """Wait until ``ready()``, which is asked with the lock held, again after every ``moved()``.

        ``action`` tells people what is waited for; the seconds are added to those of ``side``.

        Raises:
            Cancelled: the room is or gets cancelled, even where ``ready()`` holds.
        """
        self.check()
        if ready():
            return
        wait = self._begin(action, side)
        try:
            while not ready():
                self._condition.wait()
                self.check()
        finally:
            self._end(wait)

    @contextmanager
    def waiting(self, action: str, side: str) -> Iterator[None]:
        """The block waits outside of this room, in C code, and shows as a waiter meanwhile; takes the lock itself.

        Whoever cancels the room must also end that wait.

        Raises:
            Cancelled: the room has been cancelled before.
        """
        with self:
            self.check()
            self.moved()
            wait = self._begin(action, side)
        try:
            yield
        finally:
            with self:
                self._end(wait)
                self.moved()

    def _begin(self, action: str, side: str) -> _Wait:
        wait = _Wait(threading.current_thread().name, action, side, self.clock())
        self._waits[threading.get_ident()] = wait
        return wait

    def _end(self, wait: _Wait) -> None:
        del self._waits[threading.get_ident()]
        self._waited_s[wait.side] = self._waited_s.get(wait.side, 0.0) + self.clock() - wait.started_at

    def moved(self) -> None:
        """Note progress and let every waiter look again."""
        self._moved_at = self.clock()
        self._condition.notify_all()

    def passed(self) -> None:
        """Note that something has come through; needs the lock held.

        What was waited before the first time is start-up: nobody in front had anything yet.
        """
        if self._start_s is None:
            sides = {*self._waited_s, *(wait.side for wait in self._waits.values())}
            self._start_s = {side: self.waited_s(side) for side in sides}

    def cancel(self) -> None:
        """Give up for good: every waiter, now and later, gets ``Cancelled``."""
        with self:
            self._cancelled = True
            self._condition.notify_all()

    def waited_s(self, side: str) -> float:
        """Seconds waited on ``side`` so far, waits that go on included; needs the lock held."""
        now = self.clock()
        going_on = sum(now - wait.started_at for wait in self._waits.values() if wait.side == side)
        return self._waited_s.get(side, 0.0) + going_on

    def waits(self, *sides: str) -> dict[str, float]:
        """Seconds waited on each side since something came through; ``start_wait_s``: before, on all of these sides."""
        with self:
            total = {side: self.waited_s(side) for side in sides}
            start = total if self._start_s is None else {side: self._start_s.get(side, 0.0) for side in sides}
        later = {f"{side}_wait_s": total[side] - start[side] for side in sides}
        return {**later, "start_wait_s": sum(start.values())}

    def waiters(self) -> list[Waiter]:
        """Who waits now, longest first."""
        with self:
            now = self.clock()
            waits = sorted(self._waits.values(), key=lambda wait: wait.started_at)
            return [Waiter(wait.thread, wait.action, now - wait.started_at) for wait in waits]


class Cancellable(Protocol):
    """What a supervisor watches, and cancels when the run is given up."""

    @property
    def room(self) -> WaitRoom:
        """Where its waiters are."""

    def cancel(self) -> None:
        """Wake everybody who waits here with ``Cancelled``; later calls raise it at once."""
