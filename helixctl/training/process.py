"""Settings of the whole process that a run needs before its first thread starts."""

from __future__ import annotations

import ctypes

import torch

from helixctl.plan import Plan

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_KEEP_BYTES = 2**31 - 1


def set_up_process(plan: Plan) -> None:
    """Thread count, determinism and, on a CPU, the allocator; later changes would reach some threads only."""
    if plan.threads:
        torch.set_num_threads(plan.threads)
        keep_freed_memory()
    if plan.recipe.run.deterministic:
        torch.use_deterministic_algorithms(True)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed instead of giving it back to the kernel.

    Every step frees and asks for the same large buffers; fresh pages cost more than the arithmetic on them (11,000 page
    faults a step became 34, and 177 ms became 124, for two layers of width 576). One arena, since freed memory of
    one stage's thread is otherwise of no use to the others. Another libc is left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
