"""`doctor --env` where there are GPUs: what torch, CUDA and the driver would have said, and variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from helixctl.doctor import environment_gpu as gpu
from helixctl.doctor import environment_python as python
from helixctl.doctor.environment import ENVIRONMENT
from helixctl.doctor.environment_host import Host
from helixctl.doctor.environment_nvml import NvmlFacts, NvmlProblem, read_nvml
from helixctl.doctor.environment_variables import check_variables
from tests.doctor.fake_nvml import HEALTHY, FakeNvml
from tests.doctor.hosts import HostMaker, one, verdicts


@pytest.fixture
def machine(tmp_path: Path) -> HostMaker:
    return HostMaker(tmp_path / "root")


# -------------------------------------------------------------------------------------------------------- torch, CUDA


def with_torch(host: Host, torch: dict[str, Any], cuda: dict[str, Any] | None = None) -> Host:
    """The host with what its child processes would have found."""
    host.__dict__["torch"] = torch
    host.__dict__["cuda"] = cuda if cuda is not None else {"error": "nobody asked"}
    return host


BUILD = {"version": "2.11.0", "cuda": "12.8", "hip": None}
DEVICE = {"name": "H200", "capability": [9, 0], "right": True}


@pytest.mark.parametrize(
    ("torch", "state"),
    [
        ({"missing": True, "error": "ModuleNotFoundError"}, "skip"),
        ({"missing": False, "error": "ImportError: libcudart"}, "fail"),
        (BUILD, "ok"),
    ],
)
def test_torch_states(machine, torch: dict[str, Any], state: str) -> None:
    assert one(python.check_torch(with_torch(machine(), torch))).state == state


@pytest.mark.parametrize(
    ("torch", "cuda", "states"),
    [
        ({"error": "x"}, {}, ["skip"]),
        (BUILD | {"cuda": None}, {}, ["fail"]),
        (BUILD, {"available": True, "devices": [DEVICE, DEVICE]}, ["ok", "ok"]),
        (BUILD, {"available": False, "devices": []}, ["fail"]),
        (BUILD, {"error": "no answer within 180 s"}, ["fail"]),
        (BUILD | {"cuda": "13.0"}, {"available": True, "devices": [DEVICE]}, ["fail", "ok"]),
        (BUILD, {"available": True, "devices": [{"name": "T4", "error": "no kernel image"}]}, ["fail"]),
        (BUILD, {"available": True, "devices": [DEVICE | {"right": False}]}, ["fail"]),
    ],
)
def test_cuda_states(machine, torch: dict[str, Any], cuda: dict[str, Any], states: list[str]) -> None:
    host = with_torch(machine(nvml=FakeNvml(HEALTHY)), torch, cuda)
    assert [v.state for v in python.check_cuda(host)] == states


def test_cuda_is_not_looked_for_without_a_driver(machine) -> None:
    assert one(python.check_cuda(with_torch(machine(), BUILD))).state == "skip"


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("exit 3", "ended with 3"),
        ("echo '{broken'", "ended with 0"),
        ("exec sleep 60", "no answer within"),
        ("kill -SEGV $$", "ended with -11"),
        ("echo noise; echo '{\"version\": 1}'", None),
    ],
)
def test_a_child_that_crashes_or_hangs_is_an_error(tmp_path: Path, program: str, told: str | None) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{program}\n")
    fake.chmod(0o755)
    found = Host(python=str(fake), environ=dict(os.environ)).look("torch", 0.3)
    assert told in found["error"] if told else found == {"version": 1}


def test_the_real_child_answers_without_a_gpu() -> None:
    found = Host(environ={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert found.torch["version"] and "error" not in found.torch
    assert (found.cuda["available"], found.cuda["devices"]) == (False, [])


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot be started" in Host(python=str(tmp_path / "python")).look("torch", 1)["error"]


# -------------------------------------------------------------------------------------------------------------- NVML


def test_a_healthy_gpu_is_ok(machine) -> None:
    host = machine(nvml=FakeNvml(HEALTHY, HEALTHY))
    checks = [gpu.check_memory, gpu.check_modes, gpu.check_clocks, gpu.check_lanes]
    checks += [gpu.check_persistence, gpu.check_health, gpu.check_same_kind]
    assert {v.state for check in checks for v in gpu.on_gpus(check)(host)} == {"ok"}
    assert one(gpu.check_peers(host)).state == "ok"
    found = one(python.check_nvml(host))
    assert found.state == "ok" and "driver 570.86, CUDA up to 12.8, 2 GPUs" in found.message


@pytest.mark.parametrize(
    ("check", "change", "state", "word"),
    [
        (gpu.check_memory, {"MemoryInfo": type("M", (), {"total": 100, "used": 50})}, "warn", "in use"),
        (gpu.check_modes, {"MigMode": [1, 1]}, "warn", "MIG"),
        (gpu.check_modes, {"ComputeMode": 3}, "warn", "exclusive"),
        (gpu.check_modes, {"ComputeMode": 2}, "fail", "prohibited"),
        (gpu.check_clocks, {"CurrentClocksEventReasons": 0x40 | 0x4}, "warn", "heat (hardware)"),
        (gpu.check_clocks, {"CurrentClocksEventReasons": 0x4}, "ok", "held by the power cap"),
        (gpu.check_lanes, {"CurrPcieLinkWidth": 8}, "warn", "x8 of x16"),
        (gpu.check_persistence, {"PersistenceMode": 0}, "warn", "GPU 0"),
        (gpu.check_health, {"TotalEccErrors": 2}, "fail", "2 uncorrected"),
        (gpu.check_health, {"RemappedRows": (0, 1, 1, 0)}, "warn", "wait to be replaced"),
        (gpu.check_health, {"RemappedRows": (0, 1, 0, 1)}, "fail", "could not be replaced"),
    ],
)
def test_gpu_faults(machine, check: Any, change: dict[str, Any], state: str, word: str) -> None:
    found = one(check(machine(nvml=FakeNvml(HEALTHY | change))))
    assert found.state == state and word in found.message


def test_what_an_old_driver_does_not_say_is_left_out(machine) -> None:
    nvml = FakeNvml({"Name": b"Tesla"})
    host = machine(nvml=nvml)
    for probe in ENVIRONMENT:
        if probe.id.startswith("ENV04"):
            assert {v.state for v in verdicts(probe.run(host))} <= {"ok", "skip"}, probe.id
    assert isinstance(host.gpus, NvmlFacts) and host.gpus.gpus[0].name == "Tesla"
    assert not nvml.is_open, "the driver's files stay open"


def test_peers_and_order_of_unlike_gpus(machine) -> None:
    host = machine(nvml=FakeNvml(HEALTHY, HEALTHY | {"Name": "A100"}, p2p=3))
    assert one(gpu.check_peers(host)).state == "warn"
    assert one(gpu.check_same_kind(host)).state == "warn"
    ordered = machine(nvml=FakeNvml(HEALTHY, HEALTHY | {"Name": "A100"}), environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert list(gpu.check_same_kind(ordered)) == []


@pytest.mark.parametrize(("code", "state"), [(12, "skip"), (9, "fail"), (18, "fail"), (4, "fail"), (999, "fail")])
def test_why_nvml_does_not_answer(machine, code: int, state: str) -> None:
    host = machine(nvml=FakeNvml(init_error=code))
    assert isinstance(host.gpus, NvmlProblem)
    found = one(python.check_nvml(host))
    assert found.state == state
    assert state == "skip" or found.remedy


def test_no_binding(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = read_nvml()
    assert isinstance(found, NvmlProblem) and found.code is None


# --------------------------------------------------------------------------------------------------------- variables


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("OMP_WAIT_POLICY", "active", "PASSIVE"),
        ("OMP_NUM_THREADS", "9", "2"),
        ("OMP_NUM_THREADS", "many", "1"),
        ("TOKENIZERS_PARALLELISM", "True", "false"),
        ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "8"),
        ("CUDA_MODULE_LOADING", "EAGER", "LAZY"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "0"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments=True", "expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:16", "max_split_size_mb:512,garbage_collection_threshold:0.8"),
        ("PYTORCH_ALLOC_CONF", "nonsense", "roundup_power2_divisions:[256:1,512:2,>:4],backend:native"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "OFF"),
        ("TORCH_LOGS", "+dynamo", "recompiles"),
        ("TORCH_COMPILE_DISABLE", "1", "0"),
        ("NCCL_DEBUG", "INFO", "WARN"),
        ("NCCL_P2P_DISABLE", "1", "0"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "0"),
        ("HELIXCTL_FORK_GUARD", "0", "1"),
    ],
)
def test_variables(machine, name: str, bad: str, good: str) -> None:
    status = {"proc/self/status": "Cpus_allowed_list:\t0-1\n"}
    found = one(check_variables(machine(status, environ={name: bad})))
    assert found.state in ("warn", "fail") and found.message.startswith(f"{name}={bad}") and name in str(found.remedy)
    assert one(check_variables(machine(status, environ={name: good}))).state == "ok"


def test_hidden_gpus_matter_where_there_are_some(machine) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": ""}
    assert one(check_variables(machine(environ=environ))).state == "ok"
    assert one(check_variables(machine(environ=environ, nvml=FakeNvml(HEALTHY)))).state == "warn"


def test_two_allocator_settings_that_differ(machine) -> None:
    environ = {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert "differ" in one(check_variables(machine(environ=environ))).message
