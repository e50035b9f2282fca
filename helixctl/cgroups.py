"""Limits that control groups (containers, systemd, batch systems) put on a process: the smallest of all levels counts.

Versions 1 and 2. A limit may stand in any group above the process's own, and inside a container the path in
/proc/PID/cgroup may be the host's while the mount begins at the container: every place that exists is looked at.
`root` is where /proc and /sys are, for tests. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNIFIED = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
"""Where version 2 is mounted, alone and beside version 1."""


def cpu_quota(root: Path = Path("/"), pid: int | str = "self") -> float | None:
    """Cores' worth of time; None without a limit."""
    return min((quota for group in group_folders("cpu", root, pid) for quota in _quota(group)), default=None)


def memory_limit_bytes(root: Path = Path("/"), pid: int | str = "self") -> int | None:
    """Main memory; None without a limit. Version 1 says a number near 2^63 where there is none."""
    return _smallest(("memory.max", "memory.limit_in_bytes"), group_folders("memory", root, pid))


def process_limit(root: Path = Path("/"), pid: int | str = "self") -> int | None:
    """Processes and threads together; None without a limit."""
    return _smallest(("pids.max",), group_folders("pids", root, pid))


def throttled_us(root: Path = Path("/"), pid: int | str = "self") -> int | None:
    """Microseconds so far in which a quota kept threads off the cores, of the level that did it most; None without one.

    Levels of one path are throttled over the same time, so they are not added up.
    """
    found = [used for group in group_folders("cpu", root, pid) for used in _throttled(group)]
    return max(found, default=None)


def group_folders(controller: str, root: Path = Path("/"), pid: int | str = "self") -> list[Path]:
    """Folders of a process's groups for ``controller`` and of all above them, without repetition, existing or not."""
    found = [root / mount for mount in _UNIFIED]
    for line in _read(root / f"proc/{pid}/cgroup").splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        names = (f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}") if controllers else _UNIFIED
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [root.joinpath(name, *parts[:end]) for name in names for end in range(len(parts) + 1)]
    return list(dict.fromkeys([*found, root / "sys/fs/cgroup" / controller]))


def _quota(group: Path) -> Iterator[float]:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if quota.isdecimal() and period.isdecimal() and int(period):
        yield int(quota) / int(period)


def _throttled(group: Path) -> Iterator[int]:
    for line in _read(group / "cpu.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "throttled_usec":
            yield int(value)
        elif name == "throttled_time":  # version 1, in nanoseconds
            yield int(value) // 1000


def _smallest(names: tuple[str, ...], groups: list[Path]) -> int | None:
    texts = [_read(group / name) for group in groups for name in names]
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def _read(path: Path) -> str:
    """Text of a small system file without the white space around it; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
