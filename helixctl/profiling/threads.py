"""Threads of a process as the kernel accounts for them: procfs alone, no tracing, no privilege for one's own processes.

on CPU + run queue + blocked = wall clock. On the run queue a thread is ready and gets no core; blocked it waits for a
lock, the GIL, a device or the disk. Clock ticks (10 ms) are used for the split into user and system time only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True)
class ThreadReading:
    """Counters of one thread since it started."""

    thread_id: int
    started_ticks: int
    """Together with ``thread_id`` unique: numbers are used again."""
    name: str
    """As the operating system knows it, 15 bytes at most."""
    state: str
    """R running or ready, S and D asleep, T stopped, Z dead."""
    on_cpu_ns: int
    run_queue_ns: int | None
    """Ready without a core; None where the kernel does not count it."""
    user_ticks: int
    system_ticks: int
    voluntary: int
    """Times it gave up its core because it had to wait."""
    involuntary: int
    """Times a core was taken from it."""
    minor_faults: int
    major_faults: int
    processor: int

    @property
    def key(self) -> tuple[int, int]:
        """What tells this thread from all others."""
        return self.thread_id, self.started_ticks


@dataclass(frozen=True)
class ThreadUse:
    """What one thread did between two readings; shares are of the wall clock."""

    thread_id: int
    name: str
    state: str
    wall_s: float
    on_cpu_share: float
    user_share: float
    """Part of ``on_cpu_share`` in the program and its libraries."""
    system_share: float
    """Part of ``on_cpu_share`` in the kernel."""
    run_queue_share: float | None
    blocked_share: float
    """The rest of the wall clock."""
    voluntary_per_s: float
    involuntary_per_s: float
    minor_faults_per_s: float
    major_faults_per_s: float


@dataclass(frozen=True)
class ThreadSample:
    """All threads at one instant (``time.monotonic``)."""

    at_s: float
    readings: tuple[ThreadReading, ...]

    def by_key(self) -> dict[tuple[int, int], ThreadReading]:
        """Readings by thread."""
        return {reading.key: reading for reading in self.readings}


def read_threads(pid: int, root: Path = PROC) -> tuple[ThreadReading, ...]:
    """Every thread of ``pid`` that still lives when its turn comes; empty where the process is gone."""
    tasks = f"{root}/{pid}/task"
    try:
        names = os.listdir(tasks)
    except _GONE:
        return ()
    found = (_read_thread(f"{tasks}/{name}", int(name)) for name in names if name.isdecimal())
    return tuple(reading for reading in found if reading is not None)


def _read_thread(folder: str, thread_id: int) -> ThreadReading | None:
    try:
        stat, status = _read(f"{folder}/stat"), _read(f"{folder}/status")
        sched = _read_sched(f"{folder}/schedstat")
    except _GONE:  # ended since the folder was listed
        return None
    if not stat or b")" not in stat:
        return None
    head, _, rest = stat.rpartition(b")")
    fields = rest.split()  # fields[0] is the third field of proc(5), the state
    user, system = int(fields[11]), int(fields[12])
    on_cpu_ns = sched[0] if sched else (user + system) * 10**9 // _TICKS_PER_S
    return ThreadReading(
        thread_id=thread_id,
        started_ticks=int(fields[19]),
        name=head.partition(b"(")[2].decode("utf-8", "replace"),
        state=fields[0].decode(),
        on_cpu_ns=on_cpu_ns,
        run_queue_ns=sched[1] if sched else None,
        user_ticks=user,
        system_ticks=system,
        voluntary=_count(status, b"\nvoluntary_ctxt_switches:"),
        involuntary=_count(status, b"\nnonvoluntary_ctxt_switches:"),
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        processor=int(fields[36]),
    )


def _read_sched(path: str) -> tuple[int, int] | None:
    try:
        words = _read(path).split()
    except FileNotFoundError:  # a kernel without CONFIG_SCHED_INFO, or the thread has just ended
        return None
    return (int(words[0]), int(words[1])) if len(words) >= 2 and words[0] != b"0" else None


def _read(path: str) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.read(handle, 8192)
    finally:
        os.close(handle)


def _count(status: bytes, label: bytes) -> int:
    _, found, rest = status.partition(label)
    return int(rest.split(maxsplit=1)[0]) if found else 0


def use_between(first: ThreadSample, last: ThreadSample) -> tuple[ThreadUse, ...]:
    """What every thread that lives in both samples did in between, busiest first."""
    wall_s = max(last.at_s - first.at_s, 1e-9)
    before = first.by_key()
    uses = [_use(before[now.key], now, wall_s) for now in last.readings if now.key in before]
    return tuple(sorted(uses, key=lambda use: (-use.on_cpu_share, use.thread_id)))


def _use(before: ThreadReading, now: ThreadReading, wall_s: float) -> ThreadUse:
    on_cpu = min((now.on_cpu_ns - before.on_cpu_ns) / 1e9 / wall_s, 1.0)
    queued = None
    if now.run_queue_ns is not None and before.run_queue_ns is not None:
        queued = min((now.run_queue_ns - before.run_queue_ns) / 1e9 / wall_s, 1.0)
    user, system = now.user_ticks - before.user_ticks, now.system_ticks - before.system_ticks
    user_part = user / (user + system) if user + system else 1.0
    return ThreadUse(
        thread_id=now.thread_id,
        name=now.name,
        state=now.state,
        wall_s=wall_s,
        on_cpu_share=on_cpu,
        user_share=on_cpu * user_part,
        system_share=on_cpu * (1.0 - user_part),
        run_queue_share=queued,
        blocked_share=max(1.0 - on_cpu - (queued or 0.0), 0.0),
        voluntary_per_s=(now.voluntary - before.voluntary) / wall_s,
        involuntary_per_s=(now.involuntary - before.involuntary) / wall_s,
        minor_faults_per_s=(now.minor_faults - before.minor_faults) / wall_s,
        major_faults_per_s=(now.major_faults - before.major_faults) / wall_s,
    )


def ended_between(first: ThreadSample, last: ThreadSample) -> tuple[ThreadReading, ...]:
    """Threads of the first sample that are no more in the last."""
    alive = last.by_key()
    return tuple(reading for reading in first.readings if reading.key not in alive)


def cpu_seconds(pid: int, root: Path = PROC) -> float:
    """Seconds of core time that a process has used so far; 0 where it is gone."""
    try:
        fields = _read(f"{root}/{pid}/stat").rpartition(b")")[2].split()
    except _GONE:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def stopped_threads(pid: int, root: Path = PROC) -> tuple[int, ...]:
    """Threads that a tracer left stopped (state T)."""
    return tuple(reading.thread_id for reading in read_threads(pid, root) if reading.state in "Tt")
