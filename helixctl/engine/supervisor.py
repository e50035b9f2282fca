"""Runs the stages of a pipeline: set-up in order, gate, run, and one clean end whatever goes wrong, wherever.

The main thread waits on one mailbox; stages, the signal handler and timeouts are all it hears from. It alone cancels
and raises. Not here: what stages do, and what they are built from.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from helixctl.engine.gate import SETUP_LOCK, Gate
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.mailbox import Mailbox
from helixctl.engine.stage import Stage
from helixctl.engine.waiting import Cancellable, Cancelled, Clock
from helixctl.errors import HelixError, Interrupted, StageFailed
from helixctl.redact import redact_text

_PR_SET_NAME = 15
_OS_NAME_BYTES = 15
_STDERR = 2

logger = logging.getLogger(__name__)


class StallError(HelixError):
    """Nothing moved for too long; the message says which stage waits for what."""


@dataclass(frozen=True)
class Limits:
    """How long a supervisor waits."""

    start_timeout_s: float
    """For all set-ups together."""
    stall_timeout_s: float | None
    """For anything to move once the gate is open: a channel, slot pool or meeting, or a heartbeat. None: for ever."""
    join_timeout_s: float = 10.0
    """For stages to end once cancelled; a stage that sits in C code longer than this ends the process."""


class Progress:
    """Heartbeats of stages that work for long without touching a channel. Owns the clock of the supervisor."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._beats: dict[str, float] = {}
        self._listener: Callable[[], None] | None = None
        self._every_s = 0.0
        self._due_at = 0.0

    def listen(self, listener: Callable[[], None], every_s: float) -> None:
        """Call ``listener`` on the main thread about every ``every_s`` seconds, from set-up to the end of the run."""
        self._listener, self._every_s, self._due_at = listener, every_s, self.clock()

    def until_due_s(self, longest_s: float | None) -> float | None:
        """Seconds until the listener is due, ``longest_s`` at most; None: for ever."""
        if self._listener is None:
            return longest_s
        left_s = max(self._due_at - self.clock(), 0.0)
        return left_s if longest_s is None else min(left_s, longest_s)

    def tell_listener(self) -> None:
        """Call the listener if it is due."""
        if self._listener is not None and self.clock() >= self._due_at:
            self._due_at = self.clock() + self._every_s
            self._listener()

    def beat(self, stage: str) -> None:
        """``stage`` is alive and getting on; cheap enough for every micro-batch."""
        self._beats[stage] = self.clock()

    def beat_at(self, stage: str) -> float | None:
        """Instant of the last heartbeat of ``stage``."""
        return self._beats.get(stage)

    def last_beat_at(self) -> float | None:
        """Instant of the last heartbeat of any stage."""
        return max(self._beats.copy().values(), default=None)


@dataclass(frozen=True)
class StageState:
    """A stage as the operating system and the supervisor see it."""

    name: str
    thread_id: int | None
    """The thread's number in /proc and in profilers; None before it starts."""
    state: Literal["waiting", "set-up", "ready", "running", "ended"]
    """waiting: not begun; ready: set up, the gate is closed."""


@dataclass(frozen=True)
class _Failed:
    stage: str
    cause: BaseException


@dataclass(frozen=True)
class _Ended:
    stage: str


_Message = _Failed | _Ended | None


def end_process(exit_code: int) -> None:
    """End the process at once, threads that sit in C code included, after flushing what was written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe must not keep the process alive
            stream.flush()
    os._exit(exit_code)


class Supervisor:
    """Runs stages, each in its own named, non-daemon thread.

    Args:
        phases: groups of stages in the order of their set-up; stages are set up one at a time, in this order.
        cancellables: every channel, slot pool and meeting that a stage may wait at.
        limits: how long to wait for what.
        progress: heartbeats and the clock; its own if None.
        interrupt: an entered flag, if signals are to be heeded.
        on_open: called on the main thread after all set-ups and before any ``run()``.
    """

    def __init__(
        self,
        phases: Sequence[Sequence[Stage]],
        cancellables: Sequence[Cancellable],
        limits: Limits,
        *,
        progress: Progress | None = None,
        interrupt: InterruptFlag | None = None,
        on_open: Callable[[], None] | None = None,
    ) -> None:
        self._stages = [stage for phase in phases for stage in phase]
        self._gate = Gate([[stage.name for stage in phase] for phase in phases])
        names = [stage.name for stage in self._stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stage names must differ: {names}")
        self._limits = limits
        self._progress = progress or Progress()
        self._clock = self._progress.clock
        self._interrupt = interrupt
        self._on_open = on_open
        self._watched = tuple(cancellables)
        for cancellable in (*self._watched, self._gate):
            cancellable.room.clock = self._clock
        self._mailbox: Mailbox[_Message] = Mailbox()
        self._threads: dict[str, threading.Thread] = {}
        self._running: dict[str, None] = {}  # stages whose thread has started and not ended, in order
        self._moved_at = self._clock()
        self._given_up = False

    def run(self, *, hard_exit: Callable[[int], object] = end_process) -> None:
        """Set up, open the gate, and wait until every stage has ended. Call it once.

        The first failure, in any thread, cancels everything and is raised when all threads have ended. Later failures
        are logged and added to it as notes. A stage that ends with ``Cancelled`` has not failed, also where another
        stage cancelled a channel on purpose, to end those in front of it. If some thread has not ended
        ``join_timeout_s`` after the cancellation, the stacks of all threads are dumped to stderr and ``hard_exit(1)``
        is called, ``hard_exit(128 + signal)`` after a signal; it should not return.

        Raises:
            StageFailed: a stage raised in setup, run or teardown; ``__cause__`` is what it raised.
            StartTimeout: set-up took too long.
            StallError: nothing moved for too long.
            Interrupted: a signal came: during set-up, twice, or once and the stages have ended since.
            BaseException: ``on_open`` raised, or a signal handler of others did.
        """
        with self._mailbox, self._listening():
            try:
                self._set_up()
                if self._on_open is not None:
                    self._on_open()
                self._open_gate()
                self._watch()
            except BaseException as error:
                self._cancel()
                self._join(error, hard_exit)
                raise
            for thread in self._threads.values():
                thread.join()  # each has told that it ended
        if self._interrupt is not None and self._interrupt.requested:
            raise self._interrupt.error()

    @property
    def clock(self) -> Clock:
        """The clock of the run and of everything that is watched."""
        return self._clock

    def stages(self) -> tuple[StageState, ...]:
        """All stages in the order of their set-up; callable from any thread."""
        threads, running = self._threads.copy(), self._running.copy()
        return tuple(
            StageState(stage.name, thread.native_id if thread else None, self._state(stage.name, thread, running))
            for stage in self._stages
            for thread in [threads.get(stage.name)]
        )

    def _state(
        self, name: str, thread: threading.Thread | None, running: dict[str, None]
    ) -> Literal["waiting", "set-up", "ready", "running", "ended"]:
        if thread is None:
            return "waiting"
        if name not in running:
            return "ended"
        if not self._gate.is_ready(name):
            return "set-up"
        return "running" if self._gate.is_open else "ready"

    def wake(self) -> None:
        """Look at the clock now; for a clock that does not run by itself."""
        self._mailbox.put(None)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        if self._interrupt is None:
            yield
            return
        self._interrupt.listen(self.wake)
        try:
            yield
        finally:
            self._interrupt.listen(None)

    def _set_up(self) -> None:
        deadline = self._clock() + self._limits.start_timeout_s
        for stage in self._stages:
            self._check_interrupt(at_once=True)
            self._start(stage)
            while not self._gate.is_ready(stage.name):
                left_s = deadline - self._clock()
                if left_s <= 0:
                    raise self._gate.late_error(self._limits.start_timeout_s)
                self._heed(self._next(left_s))
                self._check_interrupt(at_once=True)

    def _start(self, stage: Stage) -> None:
        thread = threading.Thread(target=self._live, args=(stage,), name=stage.name, daemon=False)
        thread.start()
        self._threads[stage.name] = thread
        self._running[stage.name] = None

    def _open_gate(self) -> None:
        self._moved_at = self._clock()
        self._gate.open()

    def _watch(self) -> None:
        while self._running:
            self._check_interrupt(at_once=False)
            left_s = None
            if self._limits.stall_timeout_s is not None:
                now = self._clock()  # before the instants are read: they may only be newer
                left_s = self._last_moved_at() + self._limits.stall_timeout_s - now
                if left_s <= 0:
                    raise self._stall_error(self._limits.stall_timeout_s)
            self._heed(self._next(left_s))

    def _next(self, left_s: float | None) -> _Message:
        """The next message, or None when the time is up or the listener of ``progress`` was due."""
        message = self._mailbox.get(self._progress.until_due_s(left_s))
        self._progress.tell_listener()
        return message

    def _heed(self, message: _Message) -> None:
        match message:
            case _Failed(stage, cause):
                raise StageFailed(stage, cause) from cause
            case _Ended(stage):
                self._running.pop(stage, None)
                self._moved_at = self._clock()
            case None:
                pass  # a timeout, a signal or wake(): the caller looks around

    def _check_interrupt(self, *, at_once: bool) -> None:
        flag = self._interrupt
        if flag is not None and (flag.urgent or (at_once and flag.requested)):
            raise flag.error()

    def _last_moved_at(self) -> float:
        instants = [self._moved_at, self._progress.last_beat_at(), *(c.room.moved_at for c in self._watched)]
        return max(instant for instant in instants if instant is not None)

    def _stall_error(self, timeout_s: float) -> StallError:
        waiters = sorted((w for c in self._watched for w in c.room.waiters()), key=lambda w: -w.waited_s)
        parts = [str(waiter) for waiter in waiters]
        for stage in self._running:
            if all(waiter.thread != stage for waiter in waiters):
                beat_at = self._progress.beat_at(stage)
                beat = "" if beat_at is None else f" (last heartbeat {self._clock() - beat_at:.0f} s ago)"
                parts.append(f"{stage} waits for no channel{beat}")
        return StallError(
            f"nothing moved for {timeout_s:g} s: {'; '.join(parts)}",
            fix="look first at a stage that waits for no channel: it is stuck, or slower than the stall timeout",
        )

    def _cancel(self) -> None:
        self._given_up = True
        self._gate.cancel()
        for cancellable in self._watched:
            cancellable.cancel()

    def _join(self, first: BaseException, hard_exit: Callable[[int], object]) -> None:
        deadline = self._clock() + self._limits.join_timeout_s
        while self._running:
            left_s = deadline - self._clock()
            if left_s <= 0:
                self._give_up(first, hard_exit)
                return
            message = self._mailbox.get(left_s)
            if isinstance(message, _Failed):
                _note_later(first, message)
            else:
                self._heed(message)
        for thread in self._threads.values():
            thread.join()

    def _give_up(self, first: BaseException, hard_exit: Callable[[int], object]) -> None:
        stuck = ", ".join(self._running)
        sys.stderr.write(redact_text("".join(traceback.format_exception(first))))
        sys.stderr.write(f"{stuck} did not end {self._limits.join_timeout_s:g} s after cancellation; stacks follow\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        hard_exit(first.exit_code if isinstance(first, Interrupted) else 1)

    def _live(self, stage: Stage) -> None:
        """Body of a stage's thread."""
        _name_os_thread(stage.name)
        try:
            self._attempt(stage, self._set_up_and_run)
            self._attempt(stage, lambda own: own.teardown())
        finally:
            self._mailbox.put(_Ended(stage.name))

    def _attempt(self, stage: Stage, part: Callable[[Stage], None]) -> None:
        try:
            part(stage)
        except Cancelled as error:
            if not self._gate.is_ready(
                stage.name
            ):  # nobody may cancel a set-up but us, and then this is a later failure
                self._mailbox.put(_Failed(stage.name, error))
        except BaseException as error:
            self._mailbox.put(_Failed(stage.name, error))

    def _set_up_and_run(self, stage: Stage) -> None:
        self._gate.begin(stage.name)
        with SETUP_LOCK:
            stage.setup()
        self._gate.arrive(stage.name)
        self.wake()
        self._gate.wait()
        stage.run()


def _note_later(first: BaseException, later: _Failed) -> None:
    """Another stage failed while the run ended; it must not replace the first failure, nor vanish."""
    cause = later.cause
    logger.error("stage %r failed as well, after the first failure", later.stage, exc_info=cause)
    first.add_note(f"stage {later.stage!r} failed as well: {type(cause).__name__}: {cause}")


def _name_os_thread(name: str) -> None:
    """Show ``name`` in ``top -H`` and py-spy; Linux keeps 15 bytes."""
    unused = ctypes.c_ulong(0)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:_OS_NAME_BYTES]), unused, unused, unused)
