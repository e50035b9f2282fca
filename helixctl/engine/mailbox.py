"""The mailbox at which the main thread of a pipeline waits: for messages from any thread, and for signals."""

from __future__ import annotations

import contextlib
import math
import select
import signal
import socket
import threading
from collections import deque
from types import TracebackType
from typing import Generic, TypeVar

M = TypeVar("M")

_LONGEST_WAIT_MS = 24 * 3600 * 1000


class Mailbox(Generic[M]):
    """Messages for one reader, first in, first out; ``put`` takes no lock, so that a signal handler may call it.

    The system may give a signal to any thread, and then a main thread that waits on a lock (an event, a condition, a
    queue) does not wake up: seen when two signals came in quick succession. While entered on the main thread, the
    mailbox therefore waits on a socket, to which the interpreter writes at every signal (``signal.set_wakeup_fd``).
    """

    def __init__(self) -> None:
        self._messages: deque[M] = deque()
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._old_wakeup: int | None = None

    def __enter__(self) -> Mailbox[M]:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._ends = reader, writer
        if threading.current_thread() is threading.main_thread():
            self._old_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._ends is not None
        if self._old_wakeup is not None:
            signal.set_wakeup_fd(self._old_wakeup)
            self._old_wakeup = None
        for end in self._ends:
            end.close()
        self._ends = None

    def put(self, message: M) -> None:
        """Add ``message`` and wake the reader."""
        self._messages.append(message)
        ends = self._ends
        if ends is not None:
            with contextlib.suppress(OSError):  # full: the reader wakes anyway; closed: nobody reads any more
                ends[1].send(b"\0")

    def get(self, timeout_s: float | None) -> M | None:
        """The oldest message; None after ``timeout_s`` seconds, after a signal, or now and then for no reason."""
        if not self._messages:
            self._wait(timeout_s)
        return self._messages.popleft() if self._messages else None

    def _wait(self, timeout_s: float | None) -> None:
        assert self._ends is not None, "enter the mailbox first"
        reader = self._ends[0]
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        wait_ms = _LONGEST_WAIT_MS if timeout_s is None else min(math.ceil(timeout_s * 1000), _LONGEST_WAIT_MS)
        if poll.poll(wait_ms):
            with contextlib.suppress(BlockingIOError):
                reader.recv(4096)
