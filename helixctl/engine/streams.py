"""CUDA streams and events at the seams between stages; on a CPU everything here does nothing.

A stage enters a ``StreamContext`` and works on a stream of its own. Values leave it in a ``Handoff``, buffers that are
used again carry a ``done`` event. No host waits for a device, except on leaving a context that has no peer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Reusable(Protocol):
    """A buffer with a fixed address, written and read in turn on different streams."""

    done: torch.cuda.Event | None
    """Recorded by the last reader; the next writer waits on it. None on a CPU and before the first use."""


@dataclass(frozen=True)
class Handoff(Generic[T]):
    """A value computed on the sender's stream; the receiver calls ``take()`` before it uses it on its own.

    The sender never touches the value again.
    """

    value: T
    ready: torch.cuda.Event | None = None
    """Recorded when the value was complete; None on a CPU."""
    lent: bool = False
    """The sender keeps the memory, and writes there again only after it is told that the value has been read."""

    def take(self) -> T:
        """The value, usable on the current streams of the current device and of the value's device.

        Tensors in the value, alone or in a list or tuple, are marked as used on these streams: they come from the
        allocator's pool of the sender's stream and could else be given to the sender's next batch while a copy still
        reads them. Buffers inside other objects (a slot) are owned for the whole run and need no mark, nor does
        what is lent.
        """
        if self.ready is None:
            return self.value
        streams = {torch.cuda.current_stream(), torch.cuda.current_stream(self.ready.device)}
        for stream in streams:
            stream.wait_event(self.ready)
        for tensor in () if self.lent else _tensors(self.value):
            for stream in streams:
                if tensor.device == stream.device:
                    tensor.record_stream(stream)
        return self.value


class _ThreadStreams(threading.local):
    def __init__(self) -> None:
        self.by_index: dict[int, torch.cuda.Stream] = {}


_STREAMS = _ThreadStreams()


class StreamContext:
    """A stage's own stream on ``device``, current while the context is entered; on a CPU nothing.

    There is one stream per thread and device, made on first use and then waiting for what is queued on the device's
    default stream (set-up, slots). With ``peer``, the thread's stream on that second device is current for it as well,
    as copies between devices use the current streams of both. Leaving a context without ``peer`` waits on the host
    until its stream is finished, so that what comes after the stage sees finished work; with ``peer`` (a copy per
    micro-batch) it does not wait.
    """

    def __init__(self, device: torch.device, *, peer: torch.device | None = None) -> None:
        self._device = device
        self._peer = peer
        self._stack = ExitStack()

    def __enter__(self) -> StreamContext:
        for device in (self._peer, self._device):  # the last one entered is the current device
            if device is not None and device.type == "cuda":
                self._stack.enter_context(torch.cuda.stream(self._stream(device)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None and self._peer is None and self._device.type == "cuda":
                self._stream(self._device).synchronize()
        finally:
            self._stack.close()

    def named(self, name: str) -> AbstractContextManager[object]:
        """The block shows under ``name`` in Nsight Systems (an NVTX range) and in `torch.profiler`; on a CPU nothing.

        `helixctl profile --cuda` takes it for the time in which the stage is at work.
        """
        return _named(name) if self._device.type == "cuda" else nullcontext()

    def handoff(self, value: T, *, lent: bool = False) -> Handoff[T]:
        """Wrap what this context's stream on ``device`` has been told to compute or copy."""
        return Handoff(value, self._record(), lent)

    def done(self, buffer: Reusable) -> None:
        """Everything that reads ``buffer`` has been queued on this stream; call it before giving the buffer back."""
        buffer.done = self._record()

    def reuse(self, buffer: Reusable) -> None:
        """Let the streams of this context wait until the last reader of ``buffer`` is done; call it before writing."""
        if buffer.done is not None:
            for device in (self._device, self._peer):
                if device is not None and device.type == "cuda":
                    self._stream(device).wait_event(buffer.done)

    def _record(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=False)
        event.record(self._stream(self._device))
        return event

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        index = torch.cuda.current_device() if device.index is None else device.index
        streams = _STREAMS.by_index
        if index not in streams:
            streams[index] = torch.cuda.Stream(index)
            streams[index].wait_stream(torch.cuda.default_stream(index))
        return streams[index]


@contextmanager
def _named(name: str) -> Iterator[None]:
    # torch.profiler does not record NVTX ranges.
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name):
        yield


def _tensors(value: object) -> Sequence[Tensor]:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [part for part in parts if isinstance(part, Tensor) and part.is_cuda]
