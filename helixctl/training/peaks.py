"""How much memory a run took, against what its plan predicted; and what to do when it was too much."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import torch

from helixctl.errors import StageFailed
from helixctl.lm_plan import AnyPlan
from helixctl.memory import predicted_peaks, process_share

HOST = "host"
"""Main memory in results, whatever it was used for."""
_STATUS = Path("/proc/self/status")
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_GIB = 2**30


def measured_peaks(plan: AnyPlan) -> dict[str, int]:
    """Most bytes at one time: of this process in main memory, of tensors on every GPU."""
    peaks = {HOST: process_peak()}
    for device in _gpus(plan):
        peaks[device] = torch.cuda.max_memory_allocated(device)
    return peaks


def process_peak() -> int:
    """Most bytes of main memory that this process held.

    Linux gives a program the ``ru_maxrss`` of the one that started it, which may be far larger, so it only serves where
    the kernel does not tell ``VmHWM``.
    """
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text("ascii", "replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserved_peaks(plan: AnyPlan) -> dict[str, int]:
    """Most bytes that torch's allocator held on every GPU: tensors, what lies between them, graphs' pools."""
    return {device: torch.cuda.max_memory_reserved(device) for device in _gpus(plan)}


def expected_peaks(plan: AnyPlan) -> dict[str, int]:
    """What the plan predicts for ``measured_peaks``; for main memory only where the CPU trains."""
    return {HOST if device == "cpu" else device: size for device, size in predicted_peaks(plan.memory).items()}


def expected_process(plan: AnyPlan) -> dict[str, int]:
    """What of ``expected_peaks`` is the process itself; empty where no CPU trains."""
    size = process_share(plan.memory)
    return {HOST: size} if size else {}


def with_memory_advice(plan: AnyPlan, failed: StageFailed) -> StageFailed:
    """The same failure; where memory ran out, with what the plan expects there and the setting that shrinks it."""
    if isinstance(failed.__cause__, (torch.OutOfMemoryError, MemoryError)):
        failed.fix = f"{_advice(plan)}{_fragmentation(plan)}"
    return failed


def _advice(plan: AnyPlan) -> str:
    lines = [line for line in plan.memory if line.setting]
    largest = max(lines, key=lambda line: line.num_bytes)
    expected = ", ".join(f"{size / _GIB:.1f} GiB on {device}" for device, size in predicted_peaks(plan.memory).items())
    return (
        f"the plan expects {expected}; the largest part is {largest.name}, {largest.num_bytes / _GIB:.1f} GiB: "
        f"{largest.fix}"
    )


def _fragmentation(plan: AnyPlan) -> str:
    """Worth a try where the allocator's default is in use: segments of a fixed size leave holes."""
    if not _gpus(plan) or any("expandable_segments" in os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES):
        return ""
    return "; where much is reserved but unallocated, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def _gpus(plan: AnyPlan) -> list[str]:
    return [device for device in plan.devices if device.startswith("cuda")]
