"""Limits of control groups, from a made-up /proc and /sys: whatever level they stand at, the smallest one counts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl import cgroups
from helixctl.machine import read_machine
from helixctl.profiling.host import read_host


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


LEVELS = st.lists(st.one_of(st.none(), st.integers(1, 64)), min_size=1, max_size=5)


@given(levels=LEVELS, is_new=st.booleans())
def test_the_smallest_level_counts_in_both_versions(levels: list[int | None], is_new: bool) -> None:
    files = {"proc/self/cgroup": ("0::" if is_new else "4:cpu,cpuacct:") + "/" + "/".join("abcd"[: len(levels) - 1])}
    for depth, cores in enumerate(levels):
        inside = "/".join(["sys/fs/cgroup" + ("" if is_new else "/cpu,cpuacct"), *"abcd"[:depth]])
        quota = ("max" if is_new else "-1") if cores is None else str(cores * 1000)
        files |= (
            {f"{inside}/cpu.max": f"{quota} 1000"}
            if is_new
            else {f"{inside}/cpu.cfs_quota_us": quota, f"{inside}/cpu.cfs_period_us": "1000"}
        )
    with tempfile.TemporaryDirectory() as folder:
        found = cgroups.cpu_quota(write(Path(folder), files))
    assert found == min((float(cores) for cores in levels if cores is not None), default=None)


def test_the_machine_honours_a_quota_and_a_memory_limit_of_a_group_above(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/task",
            "proc/meminfo": "MemTotal: 1000 kB",
            "sys/fs/cgroup/job/cpu.max": "100000 100000",
            "sys/fs/cgroup/job/task/cpu.max": "max 100000",
            "sys/fs/cgroup/job/memory.max": "5000",
            "sys/fs/cgroup/job/task/memory.max": "max",
        },
    )
    machine = read_machine(root)
    assert (machine.num_cpus, machine.total_memory_bytes) == (1, 5000)


def test_unlimited_memory_of_version_1_is_no_limit(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 1000 kB", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    assert read_machine(write(tmp_path, files)).total_memory_bytes == 1000 * 1024


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/7/cgroup": "0::/job/task", "sys/fs/cgroup/job/cpu.stat": "usage_usec 9\nthrottled_usec 30"}, 30),
        ({"proc/7/cgroup": "4:cpu:/job", "sys/fs/cgroup/cpu/job/cpu.stat": "nr_periods 2\nthrottled_time 5000"}, 5),
        ({"proc/7/cgroup": "0::/job"}, None),
        ({}, None),
    ],
)
def test_throttling_of_a_group_above_is_seen(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert read_host(7, write(tmp_path, files)).throttled_us == expected


def test_a_process_limit_of_a_group_above(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/job/task", "sys/fs/cgroup/job/pids.max": "80", "sys/fs/cgroup/pids.max": "max"}
    assert cgroups.process_limit(write(tmp_path, files)) == 80
