"""The driver's view of the GPUs, through NVML. It creates no CUDA context, so the process stays safe to fork.

Every question is asked alone: what a GPU, a driver or a virtual machine does not answer is None, and the rest stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

_READ_PEER = 0  # pynvml 13 spells NVML_P2P_CAPS_INDEX_READ as a tuple by mistake
_UNCORRECTED, _SINCE_BOOT = 1, 0


@dataclass(frozen=True)
class GpuState:
    """One GPU now; None where it does not say."""

    index: int
    name: str
    uuid: str
    total_bytes: int | None
    used_bytes: int | None
    is_mig: bool | None
    is_persistent: bool | None
    compute_mode: int | None
    """NVML_COMPUTEMODE_*: 0 default, 1 and 3 exclusive, 2 prohibited."""
    slowed: int | None
    """Bit mask nvmlClocksEventReason*."""
    lanes: int | None
    max_lanes: int | None
    """PCIe width, now and at most."""
    uncorrected_errors: int | None
    """ECC, since the last boot."""
    remap_pending: bool | None
    remap_failed: bool | None


@dataclass(frozen=True)
class NvmlFacts:
    """A driver that answers."""

    driver: str
    cuda: tuple[int, int]
    """Newest CUDA version that the driver knows."""
    gpus: tuple[GpuState, ...]
    strangers: tuple[tuple[int, int], ...]
    """Pairs of GPUs that cannot read each other's memory."""


@dataclass(frozen=True)
class NvmlProblem:
    """Why there are no facts. `code` is NVML's own; None where there is no binding."""

    code: int | None
    text: str


def read_nvml(module: Any = None) -> NvmlFacts | NvmlProblem:
    """Ask everything, and let go of the driver again. `module` stands in for pynvml."""
    if module is None:
        try:
            import pynvml as module  # type: ignore[no-redef]  # loaded only where it is wanted
        except ImportError:
            return NvmlProblem(None, "the package nvidia-ml-py is not installed")
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        return NvmlProblem(int(error.value), str(error))
    try:
        return _read(module)
    except module.NVMLError as error:
        return NvmlProblem(int(error.value), str(error))
    finally:
        module.nvmlShutdown()


def _read(nvml: Any) -> NvmlFacts:
    version = int(nvml.nvmlSystemGetCudaDriverVersion())
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return NvmlFacts(
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda=(version // 1000, version % 1000 // 10),
        gpus=tuple(_read_gpu(nvml, i, handle) for i, handle in enumerate(handles)),
        strangers=tuple(_strangers(nvml, handles)),
    )


def _read_gpu(nvml: Any, index: int, handle: Any) -> GpuState:
    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):  # an older driver, or an older binding
            return None

    memory, mig, rows = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetRemappedRows")
    slowed = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if slowed is None:
        slowed = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return GpuState(
        index=index,
        name=_text(ask("nvmlDeviceGetName")),
        uuid=_text(ask("nvmlDeviceGetUUID")),
        total_bytes=_maybe(memory, lambda m: int(m.total)),
        used_bytes=_maybe(memory, lambda m: int(m.used)),
        is_mig=_maybe(mig, lambda modes: bool(modes[0])),
        is_persistent=_maybe(ask("nvmlDeviceGetPersistenceMode"), bool),
        compute_mode=ask("nvmlDeviceGetComputeMode"),
        slowed=slowed,
        lanes=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        max_lanes=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_BOOT),
        remap_pending=_maybe(rows, lambda r: bool(r[2])),
        remap_failed=_maybe(rows, lambda r: bool(r[3])),
    )


def _strangers(nvml: Any, handles: list[Any]) -> Iterator[tuple[int, int]]:
    for one, other in combinations(range(len(handles)), 2):
        try:
            status = nvml.nvmlDeviceGetP2PStatus(handles[one], handles[other], _READ_PEER)
        except (nvml.NVMLError, AttributeError):
            continue
        if status != 0:
            yield one, other


def _maybe(value: Any, convert: Callable[[Any], Any]) -> Any:
    return None if value is None else convert(value)


def _text(value: Any) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
