"""A driver that is made up: no test here needs a GPU, and none says that a real one answers so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helixctl.profiling.gpu import GpuSampler, is_visible, throttle_reasons, visible_devices


class FakeError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 12: "NVML Shared Library Not Found", 15: "GPU is lost"}.get(value, "?"))
        self.value = value


class FakeNvml:
    """Two GPUs; whatever is not defined here is what an older binding lacks."""

    NVMLError = FakeError

    def __init__(self, *, init: int | None = None, fails: dict[str, int] | None = None) -> None:
        self._init, self._fails = init, fails or {}
        self.calls: list[str] = []
        self.links = 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self._fails:
            raise FakeError(self._fails[name])

    def nvmlInit(self) -> None:
        if self._init is not None:
            raise FakeError(self._init)

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, i: int) -> int:
        return i

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle}{handle}".encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H200"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._call("util")
        return SimpleNamespace(gpu=63, memory=21)

    def nvmlDeviceGetMemoryInfo(self, handle: int, **_: Any) -> Any:
        self._call("memory")
        return SimpleNamespace(used=5 << 30, total=141 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._call("power")
        return 412_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x1 | 0x4

    def nvmlDeviceGetPcieThroughput(self, handle: int, way: int) -> int:
        return 1000 * (way + 1)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetFieldValues(self, handle: int, fields: Any) -> Any:
        self.links += 1024
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=self.links * k)) for k in (1, 2)]


def test_every_metric_is_read_and_what_is_missing_says_why():
    sampler = GpuSampler(FakeNvml(fails={"power": 3}), visible=None)
    (first, second) = sampler.sample(1.0)
    assert sampler.problem is None
    assert (first.uuid, second.uuid) == ("GPU-00", "GPU-11")
    assert first.values["util_pct"] == 63
    assert first.values["used_bytes"] == 5 << 30
    assert first.values["pcie_rx_bytes_per_s"] == 2_000_000
    assert first.values["pcie_limit_bytes_per_s"] == pytest.approx(63e9, rel=0.01)
    assert first.values["throttle_mask"] == 5  # the older name of the function, as the newer is not there
    assert "power_w" not in first.values
    missing = sampler.missing()["GPU-00"]
    assert missing["power"] == "Not Supported"
    assert "nvidia-ml-py" in missing["SM and tensor activity"]


def test_a_metric_that_failed_is_not_asked_for_again():
    nvml = FakeNvml(fails={"power": 3})
    sampler = GpuSampler(nvml)
    for now in (1.0, 2.0, 3.0):
        sampler.sample(now)
    assert nvml.calls.count("power") == 2  # once for each GPU
    assert nvml.calls.count("util") == 6


def test_nvlink_is_the_difference_of_counters():
    sampler = GpuSampler(FakeNvml(), visible="GPU-00")
    assert "nvlink_tx_bytes_per_s" not in sampler.sample(1.0)[0].values
    values = sampler.sample(3.0)[0].values
    assert values["nvlink_tx_bytes_per_s"] == 1024 * 1024 / 2
    assert values["nvlink_rx_bytes_per_s"] == 2 * 1024 * 1024 / 2


def test_a_lost_gpu_ends_the_section_and_is_told():
    sampler = GpuSampler(FakeNvml(fails={"util": 15}))
    sampler.sample(1.0)
    assert sampler.problem is not None and "lost" in sampler.problem
    assert sampler.sample(2.0) == []


def test_without_a_driver_there_is_nothing_and_no_failure():
    sampler = GpuSampler(FakeNvml(init=12))
    assert sampler.problem is not None and "Not Found" in sampler.problem
    assert sampler.sample(1.0) == []
    sampler.close()


def test_only_visible_gpus_are_asked():
    assert [s.uuid for s in GpuSampler(FakeNvml(), visible="1").sample(1.0)] == ["GPU-11"]
    assert GpuSampler(FakeNvml(), visible="").sample(1.0) == []
    assert is_visible(0, "GPU-abc", None) and is_visible(0, "GPU-abc", "GPU-a,1") and not is_visible(0, "GPU-abc", "1")
    assert visible_devices(b"A=1\0CUDA_VISIBLE_DEVICES=0,2\0") == "0,2"
    assert visible_devices(b"A=1") is None


def test_idle_is_no_reason_for_throttling():
    assert throttle_reasons(0x1 | 0x2) == []
    assert throttle_reasons(0x4 | 0x40) == ["power cap", "thermal (hardware)"]
