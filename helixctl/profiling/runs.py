"""Running trainings on this machine: which process, and which run directory.

A run holds ``run.pid`` in its run directory open, so the directory of a process is found among its open files.
"""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from pathlib import Path

from helixctl.errors import UsageError
from helixctl.profiling.threads import PROC
from helixctl.redact import redact_text

_PID_FILE = "run.pid"


@dataclass(frozen=True)
class Run:
    """A process that runs now."""

    pid: int
    run_dir: Path | None
    """None where it is no training of ours."""
    command: str


def run_dir_of(pid: int, root: Path = PROC) -> Path | None:
    """The run directory that a process holds; None where it holds none, or may not be asked."""
    try:
        handles = os.listdir(root / str(pid) / "fd")
    except OSError:
        return None
    for handle in handles:
        try:
            path = Path(os.readlink(root / str(pid) / "fd" / handle))
        except OSError:  # closed since
            continue
        if path.name == _PID_FILE and _owner(path) == pid:
            return path.parent
    return None


def find_runs(root: Path = PROC) -> tuple[Run, ...]:
    """All trainings of this user, by process number."""
    runs = []
    for pid in sorted(int(name) for name in os.listdir(root) if name.isdecimal()):
        try:
            if os.stat(root / str(pid)).st_uid != os.getuid():
                continue
            command = command_line(pid, root)
        except OSError:  # ended since
            continue
        run_dir = run_dir_of(pid, root) if "python" in command or "helixctl" in command else None
        if run_dir is not None:
            runs.append(Run(pid, run_dir, command))
    return tuple(runs)


def only_run(root: Path = PROC) -> Run:
    """The one training of this user.

    Raises:
        UsageError: there is none, or there are several, which are listed.
    """
    runs = find_runs(root)
    if not runs:
        raise UsageError(
            "no helixctl run of this user is running", fix="give a recipe to run, or --pid of any Python process"
        )
    if len(runs) > 1:
        listed = "\n".join(f"  {run.pid}  {run.run_dir}  {run.command}" for run in runs)
        raise UsageError(f"{len(runs)} helixctl runs are running:\n{listed}", fix="choose one with --pid")
    return runs[0]


def command_line(pid: int, root: Path = PROC) -> str:
    """The words that a process was started with, without secrets; raises OSError where it is gone."""
    words = (root / str(pid) / "cmdline").read_bytes().split(b"\0")
    return redact_text(" ".join(word.decode("utf-8", "replace") for word in words if word))


def check_process(pid: int, root: Path = PROC) -> None:
    """Raises UsageError where there is no process ``pid``."""
    if not (root / str(pid) / "task").is_dir():
        raise UsageError(f"there is no process {pid}", fix="check the number, e.g. with ps")


class Watch:
    """Waits for time to pass or for a process to end, whichever comes first."""

    def __init__(self, pid: int) -> None:
        self._handle = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._handle, select.POLLIN)

    def ended_within(self, seconds: float) -> bool:
        """True as soon as the process has ended, False after ``seconds``."""
        return bool(self._poll.poll(max(seconds, 0.0) * 1000))

    def close(self) -> None:
        """Let go of the process."""
        os.close(self._handle)


def _owner(pid_file: Path) -> int | None:
    try:
        return int(pid_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
