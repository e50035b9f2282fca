from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from helixctl.engine.channel import Channel
from helixctl.engine.slots import SlotPool
from helixctl.engine.streams import Handoff, StreamContext
from tests.engine.threads import Background

NUM_GPUS = torch.cuda.device_count()
DEVICES = [
    pytest.param("cpu", "cpu", id="cpu"),
    *(
        pytest.param(
            f"cuda:{source}",
            f"cuda:{target}",
            id=f"cuda {source} to {target}",
            marks=[pytest.mark.gpu, pytest.mark.skipif(max(source, target) >= NUM_GPUS, reason="too few CUDA devices")],
        )
        for source, target in ((0, 0), (0, 1))
    ),
]


@dataclass
class Slot:
    data: torch.Tensor
    done: torch.cuda.Event | None = None


def test_on_a_cpu_nothing_is_recorded():
    slot = Slot(torch.zeros(1))
    with StreamContext(torch.device("cpu"), peer=torch.device("cpu")) as stream:
        handoff = stream.handoff([slot.data])
        stream.reuse(slot)
        stream.done(slot)
    assert handoff == Handoff(value=[slot.data], ready=None)
    assert handoff.take() == [slot.data]
    assert slot.done is None


@pytest.mark.parametrize(("source", "destination"), DEVICES)
def test_no_slot_is_overwritten_before_it_was_read_nor_read_before_it_was_filled(source, destination):
    """Two small slots, slow readers and writers; every element carries its number, sums are read once at the end."""
    here, there = torch.device(source), torch.device(destination)
    size, rounds = (1 << 20 if there.type == "cuda" else 1 << 8), 50
    pool: SlotPool[Slot] = SlotPool("slots", [[Slot(torch.zeros(size, device=there)) for _ in range(2)]])
    captured: Channel[tuple[int, Slot, Handoff[list[torch.Tensor]]]] = Channel("captured", 2)
    lane: Channel[tuple[int, Handoff[Slot]]] = Channel("lane", 2)

    def target() -> None:
        with StreamContext(here) as stream:
            for seq in range(rounds):
                slot = pool.acquire(seq)
                _burn(here, 200_000)
                captured.send((seq, slot, stream.handoff([torch.full((size,), float(seq + 1), device=here)])))
        captured.close()

    def post() -> None:
        for seq, slot, features in captured:
            with StreamContext(there, peer=here) as stream:
                stream.reuse(slot)
                slot.data.copy_(features.take()[0], non_blocking=True)
                del features
                lane.send((seq, stream.handoff(slot)))
        lane.close()

    def draft() -> torch.Tensor:
        sums = []
        with StreamContext(there) as stream:
            for seq, handoff in lane:
                slot = handoff.take()
                _burn(there, 4_000_000)
                sums.append((slot.data - float(seq + 1)).abs().max())
                stream.done(slot)
                pool.release(seq)
            return torch.stack(sums)

    threads = [Background(partial(work)) for work in (target, post, draft)]
    wrong = [thread.result() for thread in threads][-1]
    assert wrong.cpu().tolist() == [0.0] * rounds


def _burn(device: torch.device, cycles: int) -> None:
    """Keep the stream busy, so that a missing wait shows."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)


def test_the_work_of_a_stage_is_a_range_on_a_gpu_and_nothing_on_a_cpu(monkeypatch):
    shown: list[str] = []

    @contextmanager
    def show(name: str):
        shown.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", show)
    for device in ("cpu", "cuda:0"):
        with StreamContext(torch.device(device)).named(f"target-0 on {device}"):
            pass
    assert shown == ["target-0 on cuda:0"]
