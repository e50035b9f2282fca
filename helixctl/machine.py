"""What this machine has: cores, memory, GPUs. Reads files and the driver's library; never imports torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    uuid: str
    memory_bytes: int
    """All of it, whoever uses it now."""


@dataclass(frozen=True)
class Machine:
    """Facts that the plan depends on. GPU i is the device `cuda:i`."""

    num_cpus: int
    """Cores that this process may use."""
    total_memory_bytes: int
    """Main memory, or the container's limit where that is smaller."""
    gpus: tuple[Gpu, ...] = ()
    has_bf16_cpu: bool = False
    """The processor multiplies bfloat16 matrices (avx512_bf16 or amx_bf16)."""


def read_machine(root: Path = Path("/")) -> Machine:
    """Look at this machine. `root` is where /proc and /sys are, for tests."""
    return Machine(
        num_cpus=_num_cpus(root),
        total_memory_bytes=_total_memory_bytes(root),
        gpus=_read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
        has_bf16_cpu=_has_bf16(root),
    )


def _read(path: Path) -> str:
    """Content of a small system file; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _num_cpus(root: Path) -> int:
    """Cores in the affinity mask, or the container's share where that is smaller."""
    usable = len(os.sched_getaffinity(0))
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdecimal() and period.isdecimal():
        usable = min(usable, max(1, math.ceil(int(quota) / int(period))))
    return usable


def _total_memory_bytes(root: Path) -> int:
    total = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdecimal() else total


def _has_bf16(root: Path) -> bool:
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("flags"):
            return not {"avx512_bf16", "amx_bf16"}.isdisjoint(line.split())
    return False


def _read_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """GPUs in the order in which CUDA will number them; none without a driver."""
    if visible is not None and not visible.strip():
        return ()
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        gpus = []
        for i in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            gpus.append(Gpu(str(name), str(uuid), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)))
        return visible_gpus(tuple(gpus), visible)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """What CUDA_VISIBLE_DEVICES leaves, in its order: numbers or the beginnings of UUIDs, up to the first bad one."""
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdecimal():
            found = gpus[int(word) : int(word) + 1]
        else:
            found = tuple(gpu for gpu in gpus if word and gpu.uuid.startswith(word))
        if len(found) != 1 or found[0] in chosen:
            break
        chosen.append(found[0])
    return tuple(chosen)
