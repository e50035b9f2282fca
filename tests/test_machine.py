"""Machine facts from a made-up /proc and /sys."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec

import pytest

from helixctl.errors import UsageError
from helixctl.machine import (
    CPU_BUILD_BYTES,
    CUDA_BUILD_BYTES,
    Gpu,
    Machine,
    World,
    process_bytes,
    read_machine,
    read_world,
    visible_gpus,
)

GPUS = tuple(Gpu("H200", f"GPU-{letter}{letter}", 140 << 30) for letter in "abcd")


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def write(**files):
        for name, text in {"proc/meminfo": "MemTotal:  1000 kB\nMemFree: 3 kB\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


def test_memory_and_processor(root):
    machine = read_machine(root(**{"proc/cpuinfo": "flags\t\t: fpu avx512_bf16 sse\n"}))
    assert machine.total_memory_bytes == 1000 * 1024
    assert machine.has_bf16_cpu
    assert machine.num_cpus == len(os.sched_getaffinity(0))
    assert machine.gpus == ()


def test_the_build_of_torch_is_looked_at_and_not_imported(tmp_path):
    spec = ModuleSpec("torch", None, is_package=True)
    assert process_bytes(None) == process_bytes(spec) == CPU_BUILD_BYTES
    spec.submodule_search_locations = [str(tmp_path)]
    assert process_bytes(spec) == CPU_BUILD_BYTES
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    assert process_bytes(spec) == CUDA_BUILD_BYTES


def test_limits_of_a_container(root):
    machine = read_machine(root(**{"sys/fs/cgroup/memory.max": "5000\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}))
    assert (machine.total_memory_bytes, machine.num_cpus) == (5000, 1)
    assert not machine.has_bf16_cpu


def test_no_limits(root):
    machine = read_machine(root(**{"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}))
    assert machine.total_memory_bytes == 1000 * 1024


def test_an_empty_root_is_survived(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_machine(tmp_path).total_memory_bytes == 0


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "abcd"),
        ("0", "a"),
        ("2, 0", "ca"),
        ("GPU-c,1", "cb"),
        ("0,9,1", "a"),
        ("0,0", "a"),
        ("-1", ""),
        ("1,-1,2", "b"),
        ("nonsense", ""),
    ],
)
def test_visible_devices_as_cuda_reads_them(visible, expected):
    assert "".join(gpu.uuid[-1] for gpu in visible_gpus(GPUS, visible)) == expected


def test_torchrun_says_which_process_this_is():
    told = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert read_world(told) == World(8, 5, 4, 1)
    assert read_world({}) == World() == World(1, 0, 1, 0)


@pytest.mark.parametrize("told", [{"RANK": "one"}, {"RANK": "2"}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}])
def test_contradicting_variables_are_refused(told):
    with pytest.raises(UsageError, match="RANK"):
        read_world(told)


def test_processes_of_a_host_own_its_gpus_in_equal_shares():
    owned = [Machine(8, 1 << 30, GPUS, world=World(2, rank, 2, rank)).own_gpus for rank in range(2)]
    assert owned == [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]
    assert Machine(8, 1 << 30, GPUS).own_gpus == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
