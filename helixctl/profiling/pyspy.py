"""py-spy as a child process that watches a running one. It never starts the training, and never has to stop it.

Two children look at once: all stacks with idle ones included (py-spy's own guess at what is idle is unreliable, so
``leaves.py`` classifies), and whoever holds the GIL. Traps of py-spy's exit codes and signals are handled here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from helixctl.profiling.threads import cpu_seconds, stopped_threads

RATE_HZ = 20
_STOP_TIMEOUT_S = 20.0
_LONGEST_S = 3600
"""py-spy ends by itself after this, should nobody be left to end it."""
_REMEDY = (
    "allow tracing: run as the same user; where /proc/sys/kernel/yama/ptrace_scope is 1, start the run from "
    "`helixctl profile RECIPE` or use sudo; in a container add --cap-add SYS_PTRACE"
)

Frames = tuple[str, ...]
"""Outermost first; each is ``function (file:line)``."""


@dataclass(frozen=True)
class Stacks:
    """Samples of one pass of py-spy."""

    rate_hz: int
    by_thread: dict[int, Counter[Frames]] = field(default_factory=dict)
    """Number of samples of each stack, by the number that the operating system gave the thread."""
    names: dict[int, str] = field(default_factory=dict)
    """Python's names of the threads."""
    problem: str | None = None
    """Why there are no samples, in a sentence with the remedy."""
    late_samples: int = 0
    """Times py-spy came too late for its own rate."""
    errors: int = 0
    cpu_s: float = 0.0
    """Seconds of core time that py-spy itself used."""

    @property
    def ticks(self) -> int:
        """Samples of the thread that was seen most: how often py-spy looked."""
        return max((sum(stacks.values()) for stacks in self.by_thread.values()), default=0)

    @property
    def num_samples(self) -> int:
        """Samples of all threads together."""
        return sum(sum(stacks.values()) for stacks in self.by_thread.values())


@dataclass(frozen=True)
class Mode:
    """What a pass of py-spy looks at."""

    name: str
    rate_hz: int
    arguments: tuple[str, ...]
    stops_threads: bool = False


def idle_mode(rate_hz: int = RATE_HZ) -> Mode:
    """Every thread's stack, waiting ones included; stops nobody."""
    return Mode("stacks", rate_hz, ("--idle", "--nonblocking"))


def gil_mode(rate_hz: int = RATE_HZ) -> Mode:
    """The stack of the thread that holds the GIL; stops nobody."""
    return Mode("gil", rate_hz, ("--gil", "--nonblocking"))


def native_mode(rate_hz: int = 10) -> Mode:
    """C and CUDA symbols as well; every sample stops all threads for milliseconds, so only in short bursts."""
    return Mode("native", rate_hz, ("--idle", "--native"), stops_threads=True)


class Pass:
    """One py-spy at work; ``stop()`` ends it and reads what it saw.

    Args:
        pid: the process to look at.
        mode: what to look at.
        folder: where its file goes.
        command: py-spy; found beside this Python or on PATH if None.
    """

    def __init__(self, pid: int, mode: Mode, folder: Path, command: str | None = None) -> None:
        self._pid = pid
        self._mode = mode
        self._file = folder / f"{mode.name}.raw"
        self._log = folder / f"{mode.name}.log"
        self._child: subprocess.Popen[bytes] | None = None
        command = command or find_pyspy()
        if command is None:
            return
        words = [command, "record", "--pid", str(pid), "--format", "raw", "--threads", "--function"]
        words += ["--duration", str(_LONGEST_S)]
        words += ["--rate", str(max(mode.rate_hz, 1)), "--output", str(self._file), *mode.arguments]
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self) -> Stacks:
        """End it and read its samples; a refusal is told in ``Stacks.problem``."""
        child = self._child
        if child is None:
            return Stacks(self._mode.rate_hz, problem="py-spy is not installed: pip install py-spy")
        cpu_s = cpu_seconds(child.pid)
        if child.poll() is None:
            child.send_signal(signal.SIGINT)  # SIGTERM would end it without a file
        try:
            code = child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        if self._mode.stops_threads:
            wake_stopped(self._pid)
        log = self._log.read_text(encoding="utf-8", errors="replace")
        if code != 0 or not self._file.exists():
            return Stacks(self._mode.rate_hz, problem=explain(log, code), cpu_s=cpu_s)
        by_thread, names = parse_raw(self._file.read_text(encoding="utf-8", errors="replace"))
        late, errors = log.count("behind in sampling"), _errors(log)
        return Stacks(self._mode.rate_hz, by_thread, names, late_samples=late, errors=errors, cpu_s=cpu_s)

    @property
    def cpu_s(self) -> float:
        """Seconds of core time used so far."""
        return cpu_seconds(self._child.pid) if self._child is not None else 0.0


def find_pyspy() -> str | None:
    """py-spy beside this Python, else on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def parse_raw(text: str) -> tuple[dict[int, Counter[Frames]], dict[int, str]]:
    """Stacks and thread names of ``py-spy record --format raw --threads``.

    A line is ``thread (TID): NAME;outermost;...;leaf COUNT``; lines of another form are left out.
    """
    by_thread: dict[int, Counter[Frames]] = {}
    names: dict[int, str] = {}
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        head, *frames = stack.split(";")
        number, found, name = head.removeprefix("thread (").partition("): ")
        if not (found and number.isdecimal() and count.isdecimal()):
            continue
        names[int(number)] = name
        by_thread.setdefault(int(number), Counter())[tuple(frames)] += int(count)
    return by_thread, names


def explain(log: str, code: int) -> str:
    """Why py-spy gave nothing, and what helps."""
    if code == -signal.SIGINT:
        return "py-spy was stopped before it had begun: the window was too short"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reason = next((line for line in lines if "denied" in line.lower()), lines[-1] if lines else f"exit code {code}")
    is_refused = any("denied" in line.lower() or "not permitted" in line.lower() for line in lines)
    remedy = f"; {_REMEDY}" if is_refused else ""
    reason = re.sub(r"^(Error|Reason|\d+): ", "", reason)
    return f"py-spy was {'refused' if is_refused else 'no help'}: {reason}{remedy}"


def wake_stopped(pid: int) -> None:
    """A tracer that ended badly may leave threads stopped; let them go on."""
    if stopped_threads(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or never ours to stop
            os.kill(pid, signal.SIGCONT)


def _errors(log: str) -> int:
    """`Wrote raw flamegraph data ... Samples: 200 Errors: 3`."""
    _, found, rest = log.partition("Errors: ")
    digits = rest.split()[0].strip(".,") if found and rest.split() else ""
    return int(digits) if digits.isdecimal() else 0
