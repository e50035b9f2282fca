"""Ctrl-C and SIGTERM: the first asks the run to finish its step, the second gives up at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from helixctl.errors import Interrupted


class InterruptFlag:
    """Catches SIGINT and SIGTERM while entered (on the main thread); puts the old handlers back on exit.

    The first signal sets ``requested``, which stages read at their step boundaries. The second tells the supervisor,
    through the listener, to cancel now; where nobody listens it raises ``Interrupted`` on the main thread.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._listener: Callable[[], None] | None = None
        self._old: dict[int, Any] = {}  # what signal.signal() returned: its type has no public name

    @property
    def requested(self) -> bool:
        """True from the first signal on."""
        return bool(self._received)

    @property
    def urgent(self) -> bool:
        """True from the second signal on."""
        return len(self._received) > 1

    @property
    def signal_number(self) -> int | None:
        """The first signal."""
        return self._received[0] if self._received else None

    def error(self) -> Interrupted:
        """The error of a run that was asked to stop; its exit code is 128 + the first signal."""
        number = self._received[0]
        how = "stopped at once" if self.urgent else "stopped"
        return Interrupted(number, f"{how} by {signal.Signals(number).name}")

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call ``listener`` from the signal handler at every signal.

        It must not take a lock: the handler runs between two bytecodes of the main thread, which may hold that lock.
        """
        self._listener = listener

    def __enter__(self) -> InterruptFlag:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._old.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)
        if self._listener is not None:
            self._listener()
        elif self.urgent:
            raise self.error()


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; processes that start in it never hear it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
