"""What this machine has: cores, memory, GPUs. Reads files and the driver's library; never imports torch."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from helixctl import cgroups
from helixctl.errors import UsageError

CPU_BUILD_BYTES, CUDA_BUILD_BYTES = 385 << 20, 690 << 20
"""Main memory of a process that has Python, torch and transformers loaded and has run a tiny model on the CPU: torch
2.13 for CPUs 381 MiB, torch 2.11 for CUDA 688 MiB, whose libraries are loaded with or without a GPU."""
_WORLD_DEFAULTS = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    uuid: str
    memory_bytes: int
    """All of it, whoever uses it now."""


@dataclass(frozen=True)
class World:
    """The processes that train together, and which of them this one is; torchrun's variables say so."""

    size: int = 1
    """Processes on all hosts together."""
    rank: int = 0
    """Number of this process among all; 0 alone writes metrics and checkpoints."""
    local_size: int = 1
    """Processes on this host."""
    local_rank: int = 0
    """Number of this process on its host; chooses its GPUs."""


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
    world: World = World()
    """This process among those that train together."""
    process_bytes: int = CPU_BUILD_BYTES
    """Main memory that a process takes before anything of a run is there."""

    @property
    def own_cpus(self) -> int:
        """Cores of this process: an equal share, at least one."""
        return max(1, self.num_cpus // self.world.local_size)

    @property
    def own_gpus(self) -> tuple[str, ...]:
        """Devices of this process: an equal, contiguous share of the host's GPUs; all of them where it is alone."""
        share = len(self.gpus) // self.world.local_size
        first = self.world.local_rank * share
        return tuple(f"cuda:{i}" for i in range(first, first + share))


def read_machine(root: Path = Path("/")) -> Machine:
    """Look at this machine. `root` is where /proc and /sys are, for tests."""
    return Machine(
        num_cpus=_num_cpus(root),
        total_memory_bytes=_total_memory_bytes(root),
        gpus=_read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
        has_bf16_cpu=_has_bf16(root),
        world=read_world(os.environ),
        process_bytes=process_bytes(importlib.util.find_spec("torch")),
    )


def read_world(environment: Mapping[str, str]) -> World:
    """What torchrun, or a launcher like it, says about this process.

    Raises:
        UsageError: the variables contradict each other.
    """
    values = {name: environment.get(name, default) for name, default in _WORLD_DEFAULTS.items()}
    told = ", ".join(f"{name}={value}" for name, value in values.items())
    fix = "start the run with torchrun, which sets all four; for one process, unset them"
    if not all(value.isdecimal() for value in values.values()):
        raise UsageError(f"{told}: these variables are whole numbers", fix=fix)
    world = World(*(int(value) for value in values.values()))
    if not (world.rank < world.size and world.local_rank < world.local_size <= world.size):
        raise UsageError(f"{told}: these variables contradict each other", fix=fix)
    return world


def _read(path: Path) -> str:
    """Content of a small system file; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _num_cpus(root: Path) -> int:
    """Cores in the affinity mask, or the container's share where that is smaller."""
    usable, quota = len(os.sched_getaffinity(0)), cgroups.cpu_quota(root)
    return usable if quota is None else min(usable, max(1, math.ceil(quota)))


def _total_memory_bytes(root: Path) -> int:
    total = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limit = cgroups.memory_limit_bytes(root)
    return total if limit is None else min(total, limit)


def process_bytes(torch: ModuleSpec | None) -> int:
    """By the build of torch, which is looked at and not imported."""
    folders = torch.submodule_search_locations if torch is not None else None
    for_cuda = any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders or ())
    return CUDA_BUILD_BYTES if for_cuda else CPU_BUILD_BYTES


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
