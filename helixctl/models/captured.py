"""Work of fixed shapes as CUDA graphs: its launches leave the interpreter lock, its inputs and outputs never move.

Rules for captures beside other threads: one at a time in a process, in the thread that will replay, in the mode
``thread_local``; see https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graph-semantics
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

WARM_UPS = 2
"""Calls before a capture: the first compiles, the second allocates what libraries need on the capture's stream."""

_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Of captures that failed. torch's allocator of pinned memory goes on asking them, and does not keep them alive."""


class Captured(Generic[T]):
    """One captured call; its outputs are overwritten by every ``replay``."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: T) -> None:
        self._graph = graph
        self._outputs = outputs

    def replay(self) -> T:
        """Queue the same work on the current stream; the same output objects every time."""
        self._graph.replay()
        return self._outputs


class GraphPool:
    """Captures calls into graphs that share one memory pool, so they run one after another on one stream.

    Outputs stay; what is between is reused from graph to graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], T]) -> Captured[T]:
        """Call ``function`` a few times, then capture it; leaves nothing running on the device.

        After an error the process goes on as if nothing had been captured, but this pool takes no further captures.

        Raises:
            RuntimeError: it does something that no graph can hold, such as waiting for the device.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                function()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        cause: BaseException | None = None
        try:
            # The stream is entered here too: torch does not leave it where the end of the capture fails.
            with (
                torch.cuda.device(self._device),
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    outputs = function()
                except BaseException as error:
                    cause = error
                    raise
        except BaseException as error:
            self._abandon(graph)
            raise cause or error from None  # the end complains too, and only of what was wrong before
        torch.cuda.synchronize(self._device)
        return Captured(graph, outputs)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Undo what torch leaves of a failed capture.

        torch 2.11 does not tell its allocator that the capture is over (https://github.com/pytorch/pytorch/pull/180395);
        memory that was used on several streams would then never be free again.
        """
        index = self._device.index or 0
        try:
            torch._C._cuda_endAllocateToPool(index, self._pool)
        except RuntimeError:  # it knows
            graph.reset()
            return
        torch._C._cuda_releasePool(index, self._pool)
        _ABANDONED.append(graph)


class CapturedForward:
    """``function`` of a few tensors of fixed shape, on one device. For one thread at a time.

    It is captured several times, each time with outputs of its own, so that one set can be computed while another is
    copied away. The caller sees to it that a set has been read before its turn comes again.
    """

    def __init__(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], device: torch.device, num_sets: int
    ) -> None:
        """Warm up and capture.

        Args:
            function: Takes tensors like ``inputs`` on ``device``; launches the same work whatever they hold.
            inputs: Examples on the CPU or on the device.
            device: A CUDA device.
            num_sets: Sets of outputs.

        Raises:
            RuntimeError: see ``GraphPool.capture``.
        """
        self._inputs = [torch.empty_like(tensor, device=device).copy_(tensor) for tensor in inputs]
        self._turn = 0
        pool = GraphPool(device)
        self._sets = [pool.capture(lambda: list(function(*self._inputs))) for _ in range(num_sets)]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Queue the copy of ``inputs`` and the forward on the current stream.

        Returns:
            The outputs of the set whose turn it is; they are overwritten ``num_sets`` calls later.
        """
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given, non_blocking=True)
        turn = self._turn
        self._turn = (turn + 1) % len(self._sets)
        return self._sets[turn].replay()
