"""GPUs as the driver sees them, through NVML: each metric stands and falls alone.

A metric that a GPU, a driver or a virtual machine does not offer is noted once with the reason and not asked for again.
Without a driver there is nothing, and no failure. NVML makes no CUDA context. GPUs are named by UUID: CUDA and NVML may
number them differently.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_KIB = 1024
_PCIE_TX, _PCIE_RX = 0, 1
_CLOCK_SM = 1
_NVLINK_DATA_TX, _NVLINK_DATA_RX = 138, 139
_ALL_LINKS = 0xFFFFFFFF
_GPM_METRICS = {"sm_util_pct": 2, "sm_occupancy_pct": 3, "tensor_util_pct": 5, "dram_util_pct": 10}
THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""Reasons that cost speed; being idle and user-set clocks are none."""


class _NotOffered(Exception):
    """A metric that this GPU does not have."""


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one instant; what it does not tell is missing from ``values``."""

    at_s: float
    uuid: str
    values: dict[str, float]


@dataclass
class _Device:
    handle: Any
    uuid: str
    name: str
    missing: dict[str, str] = field(default_factory=dict)
    """Metrics given up, and why."""
    last_gpm: Any = None
    last_links: tuple[float, float, float] | None = None
    """Instant, and KiB sent and received over NVLink so far."""


class GpuSampler:
    """Asks every GPU that the process may use. ``problem`` says why there is nothing to ask.

    Args:
        module: stands in for pynvml.
        visible: CUDA_VISIBLE_DEVICES of the profiled process, where it is known.
    """

    def __init__(self, module: Any = None, visible: str | None = None) -> None:
        self.problem: str | None = None
        self._devices: list[_Device] = []
        self._nvml = module
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
        except ImportError:
            self.problem = "the package nvidia-ml-py is not installed"
            return
        except self._nvml.NVMLError as error:
            self.problem = f"no NVIDIA driver answers: {error}"
            return
        self._open(visible)

    def _open(self, visible: str | None) -> None:
        nvml = self._nvml
        try:
            for i in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(i)
                uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
                if is_visible(i, uuid, visible):
                    self._devices.append(_Device(handle, uuid, name))
        except nvml.NVMLError as error:
            self.problem = f"the driver stopped answering: {error}"

    @property
    def names(self) -> dict[str, str]:
        """Model names by UUID."""
        return {device.uuid: device.name for device in self._devices}

    def missing(self) -> dict[str, dict[str, str]]:
        """Metrics that could not be read, and why, by UUID."""
        return {device.uuid: dict(device.missing) for device in self._devices if device.missing}

    def sample(self, now_s: float) -> list[GpuSample]:
        """Every GPU now; a lost one ends the section and is told in ``problem``."""
        samples = []
        for device in self._devices:
            values: dict[str, float] = {}
            for name, read in _METRICS.items():
                found = self._ask(device, name, lambda d=device, r=read: r(self._nvml, d, now_s))  # type: ignore[misc]
                values.update(found)
            samples.append(GpuSample(now_s, device.uuid, values))
        if self.problem is not None:
            self._devices = []
        return samples

    def _ask(self, device: _Device, name: str, read: Callable[[], dict[str, float]]) -> dict[str, float]:
        if name in device.missing or self.problem is not None:
            return {}
        nvml = self._nvml
        try:
            return read()
        except nvml.NVMLError as error:
            if error.value in (getattr(nvml, "NVML_ERROR_GPU_IS_LOST", 15), getattr(nvml, "NVML_ERROR_UNKNOWN", 999)):
                self.problem = f"{device.name} ({device.uuid}) was lost: {error}"
            device.missing[name] = str(error)
        except _NotOffered as error:
            device.missing[name] = str(error)
        except (AttributeError, TypeError) as error:  # an older binding does not know the function
            device.missing[name] = f"not in this version of nvidia-ml-py ({error})"
        return {}

    def close(self) -> None:
        """Let go of the driver."""
        if self._devices:
            self._nvml.nvmlShutdown()
        self._devices = []


def is_visible(index: int, uuid: str, visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES lets a process use this GPU; numbers are taken in the order of the bus."""
    if visible is None:
        return True
    words = [word.strip() for word in visible.split(",") if word.strip()]
    return any(word == str(index) or (not word.isdecimal() and uuid.startswith(word)) for word in words)


def visible_devices(environment: bytes) -> str | None:
    """CUDA_VISIBLE_DEVICES in the text of /proc/PID/environ."""
    for entry in environment.split(b"\0"):
        if entry.startswith(b"CUDA_VISIBLE_DEVICES="):
            return os.fsdecode(entry.partition(b"=")[2])
    return None


def throttle_reasons(mask: int) -> list[str]:
    """What slows a GPU down, in words."""
    return [name for bit, name in THROTTLES.items() if mask & bit]


def _utilisation(nvml: Any, device: _Device, _: float) -> dict[str, float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(device.handle)
    return {"util_pct": float(rates.gpu), "memory_util_pct": float(rates.memory)}


def _memory(nvml: Any, device: _Device, _: float) -> dict[str, float]:
    version = getattr(nvml, "nvmlMemory_v2", None)  # v1 counts what the driver reserves as used
    arguments = {} if version is None else {"version": version}
    memory = nvml.nvmlDeviceGetMemoryInfo(device.handle, **arguments)
    return {"used_bytes": float(memory.used), "total_bytes": float(memory.total)}


def _power(nvml: Any, device: _Device, _: float) -> dict[str, float]:
    return {"power_w": nvml.nvmlDeviceGetPowerUsage(device.handle) / 1000}


def _power_limit(nvml: Any, device: _Device, _: float) -> dict[str, float]:
    return {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(device.handle) / 1000}


def _clock(nvml: Any, device: _Device, _: float) -> dict[str, float]:
    return {"sm_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(device.handle, _CLOCK_SM))}


def _max_clock(nvml: Any, device: _Device, _: float) -> dict[str, float]:
    return {"sm_clock_max_mhz": float(nvml.nvmlDeviceGetMaxClockInfo(device.handle, _CLOCK_SM))}


def _throttle(nvml: Any, device: _Device, _: float) -> dict[str, float]:
    try:
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(device.handle)
    except (nvml.NVMLError, AttributeError):  # the name before driver 535
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device.handle)
    return {"throttle_mask": float(mask)}


def _pcie(nvml: Any, device: _Device, _: float) -> dict[str, float]:
    """Each of the two calls takes about 20 ms, over which the driver counts."""
    return {
        "pcie_tx_bytes_per_s": nvml.nvmlDeviceGetPcieThroughput(device.handle, _PCIE_TX) * 1000.0,
        "pcie_rx_bytes_per_s": nvml.nvmlDeviceGetPcieThroughput(device.handle, _PCIE_RX) * 1000.0,
    }


def _pcie_limit(nvml: Any, device: _Device, _: float) -> dict[str, float]:
    generation = int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(device.handle))
    lanes = int(nvml.nvmlDeviceGetCurrPcieLinkWidth(device.handle))
    lane_bytes_per_s = 0.25e9 * 2 ** (generation - 1) if generation < 3 else 0.985e9 * 2 ** (generation - 3)
    return {"pcie_limit_bytes_per_s": lane_bytes_per_s * lanes}


def _nvlink(nvml: Any, device: _Device, now_s: float) -> dict[str, float]:
    fields = [(_NVLINK_DATA_TX, _ALL_LINKS), (_NVLINK_DATA_RX, _ALL_LINKS)]
    answers = nvml.nvmlDeviceGetFieldValues(device.handle, fields)
    for answer in answers:
        if answer.nvmlReturn != 0:
            raise nvml.NVMLError(answer.nvmlReturn)
    sent, received = (float(answer.value.ullVal) for answer in answers)
    last, device.last_links = device.last_links, (now_s, sent, received)
    if last is None or now_s <= last[0]:
        return {}
    seconds = now_s - last[0]
    return {
        "nvlink_tx_bytes_per_s": (sent - last[1]) * _KIB / seconds,
        "nvlink_rx_bytes_per_s": (received - last[2]) * _KIB / seconds,
    }


def _activity(nvml: Any, device: _Device, _: float) -> dict[str, float]:
    """Hopper and later: how full the GPU is, from two samples of its own counters."""
    if device.last_gpm is None and not nvml.nvmlGpmQueryDeviceSupport(device.handle).isSupportedDevice:
        raise _NotOffered("the GPU has no performance counters for this")
    sample = nvml.nvmlGpmSampleAlloc()
    nvml.nvmlGpmSampleGet(device.handle, sample)
    last, device.last_gpm = device.last_gpm, sample
    if last is None:
        return {}
    try:
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_GPM_METRICS)
        request.sample1, request.sample2 = last, sample
        for i, number in enumerate(_GPM_METRICS.values()):
            request.metrics[i].metricId = number
        nvml.nvmlGpmMetricsGet(request)
    finally:
        nvml.nvmlGpmSampleFree(last)
    read = [request.metrics[i] for i in range(len(_GPM_METRICS))]
    return {name: float(m.value) for name, m in zip(_GPM_METRICS, read, strict=True) if m.nvmlReturn == 0}


_METRICS: dict[str, Callable[[Any, _Device, float], dict[str, float]]] = {
    "utilisation": _utilisation,
    "SM and tensor activity": _activity,
    "memory": _memory,
    "power": _power,
    "power limit": _power_limit,
    "clock": _clock,
    "highest clock": _max_clock,
    "throttle reasons": _throttle,
    "PCIe traffic": _pcie,
    "PCIe limit": _pcie_limit,
    "NVLink traffic": _nvlink,
}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
