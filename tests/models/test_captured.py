from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from helixctl.models.captured import GraphPool


class FakeCuda:
    """As torch 2.11 behaves: a capture that fails leaves its stream current and the allocator waiting for its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, tells_end: bool) -> None:
        self.current: Any = "the caller's"
        self.routed: list[Any] = []
        """Pools that the allocator routes to; while there is one, memory used on other streams is never free again."""
        self.held = 0
        self._tells_end = tells_end
        own: dict[str, Any] = {
            "Stream": lambda _device: self,
            "CUDAGraph": lambda: self,
            "current_stream": lambda _device: self.current,
            "device": lambda _device: nullcontext(),
            "graph": self.graph,
            "graph_pool_handle": lambda: (0, 7),
            "stream": self.stream,
            "synchronize": lambda _device: None,
        }
        for name, value in own.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release)

    def reset(self) -> None:
        """Of the one graph, which holds the pool as soon as its capture has ended."""
        self.held -= 1

    def wait_stream(self, _other: Any) -> None:
        """Of the one stream."""

    def synchronize(self) -> None:
        """Of the one stream."""

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, _graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        before, self.current = self.current, stream
        self.routed.append(pool)
        self.held += 1
        try:
            yield
        except BaseException:
            if self._tells_end:
                self.routed.remove(pool)
                raise
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904  # as torch does
        self.routed.remove(pool)
        self.current = before

    def end(self, _device: int, pool: Any) -> None:
        if pool not in self.routed:
            raise RuntimeError("not recording to this pool")
        self.routed.remove(pool)

    def release(self, _device: int, _pool: Any) -> None:
        self.held -= 1


class Fails:
    """A call that only a capture refuses."""

    def __init__(self, num_good: int) -> None:
        self.num_good = num_good

    def __call__(self) -> int:
        self.num_good -= 1
        if self.num_good < 0:
            raise ValueError("it waits for the device")
        return self.num_good


@pytest.mark.parametrize("tells_end", [False, True])
def test_a_failed_capture_leaves_stream_and_allocator_as_they_were(
    monkeypatch: pytest.MonkeyPatch, tells_end: bool
) -> None:
    cuda = FakeCuda(monkeypatch, tells_end=tells_end)
    with pytest.raises(ValueError, match="it waits for the device"):  # not the capture's own complaint
        GraphPool(torch.device("cuda:0")).capture(Fails(2))
    assert cuda.current == "the caller's"
    assert not cuda.routed
    assert cuda.held == 0


def test_a_capture_keeps_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, tells_end=False)
    GraphPool(torch.device("cuda:0")).capture(Fails(3))
    assert (cuda.current, cuda.routed, cuda.held) == ("the caller's", [], 1)


@pytest.mark.gpu
def test_memory_comes_back_after_a_failed_capture() -> None:
    device = torch.device("cuda:0")
    flag = torch.ones((), device=device)
    before = torch.cuda.current_stream(device)
    with pytest.raises(RuntimeError):
        GraphPool(device).capture(lambda: bool(flag))
    assert torch.cuda.current_stream(device) == before
    other = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved(device)
    for _ in range(8):
        lent = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
        lent.record_stream(other)
        del lent
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved(device) - held <= 128 << 20
    torch.cuda.empty_cache()  # torch 2.11 ends the process here where it still waits for the end of a capture
    total = GraphPool(device).capture(lambda: flag + 1).replay()
    assert float(total) == 2.0
