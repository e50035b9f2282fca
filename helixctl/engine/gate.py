"""The gate between set-up and run: nothing runs until every stage is ready."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from helixctl.engine.waiting import WaitRoom
from helixctl.errors import HelixError

SETUP_LOCK = threading.Lock()
"""Held during every ``Stage.setup``: compilers and graph capture keep state per process. Take it for any other
compile, trace or capture in the process."""


class StartTimeout(HelixError):
    """Not all stages were ready in time; the message names the late ones."""


class Gate:
    """Opens when all stages are ready. ``phases`` holds the stages' names in the order of their set-up."""

    def __init__(self, phases: Sequence[Sequence[str]]) -> None:
        self.name = "gate"
        self.room = WaitRoom("gate")
        self.phases = tuple(tuple(phase) for phase in phases)
        self._begun: set[str] = set()
        self._ready: set[str] = set()
        self._open = False

    def begin(self, name: str) -> None:
        """Stage ``name`` now sets up."""
        with self.room:
            self._begun.add(name)

    def arrive(self, name: str) -> None:
        """Stage ``name`` is ready."""
        with self.room:
            self._ready.add(name)
            self.room.moved()

    def is_ready(self, name: str) -> bool:
        """True once stage ``name`` has arrived."""
        with self.room:
            return name in self._ready

    @property
    def is_open(self) -> bool:
        """True once all stages may run."""
        return self._open

    def late(self) -> tuple[str, ...]:
        """Stages that are not ready, in order."""
        with self.room:
            return tuple(name for phase in self.phases for name in phase if name not in self._ready)

    def late_error(self, timeout_s: float) -> StartTimeout:
        """The error for a start that took longer than ``timeout_s`` seconds."""
        late = self.late()
        with self.room:
            busy = [name for name in late if name in self._begun]
            waiting = [name for name in late if name not in self._begun]
        parts = [f"{', '.join(busy)} still in setup"] if busy else []
        parts += [f"{', '.join(waiting)} not begun"] if waiting else []
        return StartTimeout(f"not all stages were ready after {timeout_s:g} s: {'; '.join(parts)}")

    def open(self) -> None:
        """Let all stages run; all must be ready."""
        late = self.late()
        assert not late, f"the gate cannot open, not ready: {late}"
        with self.room:
            self._open = True
            self.room.moved()

    def wait(self) -> None:
        """Wait until the gate opens.

        Raises:
            Cancelled: it will not.
        """
        with self.room:
            self.room.wait_until(lambda: self._open, "for the gate to open", "gate")

    def cancel(self) -> None:
        """Never open: everybody who waits here, or comes later, gets ``Cancelled``."""
        self.room.cancel()
