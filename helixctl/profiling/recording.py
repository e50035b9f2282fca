"""Looks at one process for a while and keeps what it saw: threads, status, GPUs, stacks.

The order of a look at one of our runs: set-up and warm-up pass by and are told apart; a stretch with nothing but the
status file shows the speed without a profiler; then the window, with everything on. One thread does it all, in the
process of the profiler, and waits on the profiled process between two looks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from helixctl.profiling.cuda_request import TRACE_S, Traced, TraceRequest
from helixctl.profiling.gpu import GpuSample, GpuSampler, visible_devices
from helixctl.profiling.host import HostReading, read_host
from helixctl.profiling.pipeline import Status, StatusReader, is_open
from helixctl.profiling.pyspy import Mode, Pass, Stacks, gil_mode, idle_mode, native_mode
from helixctl.profiling.runs import Watch
from helixctl.profiling.threads import ThreadSample, read_threads

OnProgress = Callable[[str, float, float], None]
"""What is going on, and how far it is: seconds done, seconds in all."""

_LOOK_S = 0.1
_GPU_EVERY_S = 1.0
_NATIVE_BURST_S = 3.0


@dataclass(frozen=True)
class Options:
    """How long to look, and how often."""

    seconds: float = 20.0
    """Length of the window."""
    steps: int | None = None
    """End the window after so many optimizer steps; ``seconds`` then is the longest that it lasts."""
    threads_hz: float = 2.0
    """Looks at threads, 1 to 5 a second."""
    stacks_hz: int = 20
    """Looks at stacks; 0: none."""
    warmup_s: float = 0.0
    """Seconds after the start of a run that do not count."""
    warmup_items: int = 0
    """Micro-batches that the last stage must have taken before anything counts."""
    baseline_s: float = 0.0
    """Seconds with nothing but the status file, to see what profiling costs."""
    native: bool = False
    """A short burst with C symbols at the end, which stops all threads at every sample."""
    cuda: bool = False
    """A trace of kernels and CUDA calls at the end, made by the run; only a run that was started for it can."""


@dataclass
class Recording:
    """Everything seen. Instants are those of ``time.monotonic``."""

    pid: int
    run_dir: Path | None
    started_at: float
    opened_at: float | None = None
    """The pipeline's stages began to run; None where they did before anybody looked."""
    baseline_at: float | None = None
    window_at: float = 0.0
    ended_at: float = 0.0
    has_ended: bool = False
    """The process was gone before the window was over."""
    threads: list[ThreadSample] = field(default_factory=list)
    statuses: list[Status] = field(default_factory=list)
    """From the start of the baseline on."""
    last_status: Status | None = None
    gpus: list[GpuSample] = field(default_factory=list)
    gpu_names: dict[str, str] = field(default_factory=dict)
    gpu_problem: str | None = None
    gpu_missing: dict[str, dict[str, str]] = field(default_factory=dict)
    stacks: Stacks = field(default_factory=lambda: Stacks(0))
    gil: Stacks = field(default_factory=lambda: Stacks(0))
    native: Stacks | None = None
    cuda: Traced | None = None
    own_cpu_s: float = 0.0
    """Core time of this process in the window; py-spy's stands with its stacks."""
    host: tuple[HostReading, HostReading] | None = None

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return max(self.ended_at - self.window_at, 0.0)

    @property
    def window_statuses(self) -> list[Status]:
        """Those of the window alone, from the last one before it on."""
        return [status for status in self.statuses if self.window_at - 0.5 <= status["at_s"] <= self.ended_at]


class Recorder:
    """Makes one recording.

    Args:
        pid: the process.
        run_dir: where its status is; None for a process that is no run of ours.
        options: how long and how often.
        folder: where py-spy's files go.
    """

    def __init__(self, pid: int, run_dir: Path | None, options: Options, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._watch = Watch(pid)
        self._reader = StatusReader(run_dir, pid) if run_dir is not None else None
        self._seen = Recording(pid, run_dir, time.monotonic())
        self._gpus = GpuSampler(visible=_visible(pid))
        self._gpu_due_at = 0.0

    def record(self, on_progress: OnProgress = lambda what, done, total: None) -> Recording:
        """Look until the window is over or the process has ended."""
        seen, options = self._seen, self._options
        seen.gpu_names, seen.gpu_problem = self._gpus.names, self._gpus.problem
        try:
            if self._reader is not None:
                self._pass_warmup(on_progress)
                self._run_baseline(on_progress)
            if not seen.has_ended:
                self._run_window(on_progress)
            if options.native and not seen.has_ended:
                self._run_native(on_progress)
            if options.cuda and not seen.has_ended:
                self._run_cuda(on_progress)
        finally:
            seen.gpu_missing = self._gpus.missing()
            seen.gpu_problem = self._gpus.problem
            self._gpus.close()
            self._watch.close()
        return seen

    def _pass_warmup(self, on_progress: OnProgress) -> None:
        seen, options = self._seen, self._options
        saw_setup, opened_at = False, 0.0
        while self._look_at_status(_LOOK_S):
            status = seen.last_status
            now = time.monotonic()
            if status is None or not is_open(status):
                saw_setup = True
                late = [s["name"] for s in status["stages"] if s["state"] == "set-up"] if status else []
                on_progress(f"set-up: {', '.join(late) or 'start'}", now - seen.started_at, 0)
                continue
            opened_at = opened_at or now
            seen.opened_at = opened_at if saw_setup else None
            items = status["links"][-1]["channel"]["received"] if status["links"] else options.warmup_items
            warmup_s = options.warmup_s if saw_setup else 0.0  # a run that goes on already is warm
            if now - opened_at >= warmup_s and items >= options.warmup_items:
                return
            on_progress("warm-up", now - opened_at, options.warmup_s)

    def _run_baseline(self, on_progress: OnProgress) -> None:
        seen = self._seen
        seen.baseline_at = time.monotonic()
        end = seen.baseline_at + self._options.baseline_s
        if seen.last_status is not None:
            seen.statuses.append(seen.last_status)
        while (now := time.monotonic()) < end and self._look_at_status(min(_LOOK_S, end - now)):
            on_progress("speed without profiler", now - seen.baseline_at, self._options.baseline_s)

    def _run_window(self, on_progress: OnProgress) -> None:
        seen = self._seen
        passes = self._start_passes()
        try:
            seen.window_at = time.monotonic()
            first_host, cpu_s = read_host(seen.pid), time.process_time()
            self._look_on(on_progress)
            seen.ended_at = time.monotonic()
            seen.own_cpu_s = time.process_time() - cpu_s
            seen.host = first_host, read_host(seen.pid)
        finally:
            stacks = [one.stop() for one in passes]
        if stacks:
            seen.stacks, seen.gil = stacks

    def _look_on(self, on_progress: OnProgress) -> None:
        seen, options = self._seen, self._options
        first_step = _step(seen.last_status)
        self._look_at_everything()
        look_at = seen.window_at
        while True:
            now = time.monotonic()
            left_s = seen.window_at + options.seconds - now
            if left_s <= 0 or self._are_steps_done(first_step):
                break
            look_at = max(look_at + 1 / options.threads_hz, now)
            if not self._wait_until(min(look_at, now + left_s)):
                break
            self._look_at_everything()
            on_progress("profile", time.monotonic() - seen.window_at, options.seconds)

    def _start_passes(self) -> list[Pass]:
        rate_hz = self._options.stacks_hz
        if not rate_hz:
            return []
        return [self._pass(mode) for mode in (idle_mode(rate_hz), gil_mode(rate_hz))]

    def _run_native(self, on_progress: OnProgress) -> None:
        on_progress("native stacks (every sample stops all threads)", 0, _NATIVE_BURST_S)
        burst = self._pass(native_mode())
        self._watch.ended_within(_NATIVE_BURST_S)
        self._seen.native = burst.stop()

    def _run_cuda(self, on_progress: OnProgress) -> None:
        if self._seen.run_dir is None:
            return
        request = TraceRequest(self._seen.run_dir)
        while (traced := request.answer()) is None:
            if not self._look_at_status(_LOOK_S):
                return
            on_progress("kernels and CUDA calls", request.waited_s, TRACE_S)
        self._seen.cuda = traced

    def _pass(self, mode: Mode) -> Pass:
        return Pass(self._seen.pid, mode, self._folder)

    def _are_steps_done(self, first_step: int) -> bool:
        steps = self._options.steps
        return steps is not None and _step(self._seen.last_status) - first_step >= steps

    def _wait_until(self, instant: float) -> bool:
        """False as soon as the process has ended; the status is read at least ten times a second."""
        while (left_s := instant - time.monotonic()) > 0:
            if not self._look_at_status(min(left_s, _LOOK_S)):
                return False
        return True

    def _look_at_status(self, seconds: float) -> bool:
        """Wait so long, then read the status if there is a new one; False when the run has ended."""
        seen = self._seen
        seen.has_ended = self._watch.ended_within(seconds)
        status = self._reader.read() if self._reader is not None else None
        if status is not None:
            seen.last_status = status
            if seen.baseline_at is not None and status["phase"] == "running":
                seen.statuses.append(status)
        return not seen.has_ended and (status is None or status["phase"] == "running")

    def _look_at_everything(self) -> None:
        seen = self._seen
        now = time.monotonic()
        readings = read_threads(seen.pid)
        if readings:
            seen.threads.append(ThreadSample(now, readings))
        if now >= self._gpu_due_at:
            self._gpu_due_at = now + _GPU_EVERY_S
            seen.gpus += self._gpus.sample(now)


def _step(status: Status | None) -> int:
    return int(status["counters"].get("step", 0)) if status else 0


def _visible(pid: int) -> str | None:
    try:
        return visible_devices(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:  # another user's process
        return None


def cores_used(recording: Recording) -> float:
    """Cores that profiling took in the window: this process and py-spy."""
    spent_s = recording.own_cpu_s + recording.stacks.cpu_s + recording.gil.cpu_s
    return spent_s / recording.seconds if recording.seconds else 0.0


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
