"""Threads whose end a test can wait for, and whose waits it can see; nothing here sleeps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from helixctl.engine.waiting import Cancellable

PATIENCE_S = 20.0


class Background:
    """Calls ``work`` in a thread; ``result()`` joins and returns or raises what it did."""

    def __init__(self, work: Callable[[], Any], name: str = "background") -> None:
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), f"{self.thread.name} did not end"
        if self._error is not None:
            raise self._error
        return self._value


def until(condition: Callable[[], bool]) -> None:
    """Give way to other threads until ``condition()``."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        os.sched_yield()


def until_waiting(where: Cancellable, num_waiters: int = 1) -> None:
    """Returns when so many threads wait there."""
    until(lambda: len(where.room.waiters()) >= num_waiters)


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
