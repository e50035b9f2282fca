"""The stages in front of a drafter: reader, target, and the target's postprocess thread.

    reader --work--> target --features--> post --lanes--> drafter

A reader takes the next number, waits for that number's slot, and builds the micro-batch. A target computes features and
nothing else. Its postprocess thread moves them into the slot and hands the slot over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helixctl.data.batch import MicroBatch, SlotBatch
from helixctl.engine.channel import Channel, OrderedChannel
from helixctl.engine.slots import SlotPool
from helixctl.engine.streams import Handoff, StreamContext
from helixctl.models.features import OUTPUT_SETS
from helixctl.training.feature_cache import FeatureSource
from helixctl.training.features import check_taps, leave_out_bad
from helixctl.training.transport import Choice, Direct, Transport, choose_transport


@dataclass(frozen=True)
class Work:
    """A micro-batch and the slot it will fill."""

    batch: MicroBatch
    slot: SlotBatch
    place: int
    """The batch's number among those of this process; its ``seq`` counts through all of them."""


@dataclass(frozen=True)
class Captured:
    """A micro-batch whose features have been computed on the target's stream."""

    work: Work
    features: Handoff[list[Tensor]]


@dataclass(frozen=True)
class TargetEnds:
    """Between a target and its postprocess thread."""

    out: Channel[Captured]
    read: Channel[Handoff[None]]
    """Comes back when features have been read; room for ``OUTPUT_SETS``, so that sending never waits."""


class NumberSource:
    """Hands the places of this process's micro-batches to the readers, each with its slot, in order."""

    def __init__(self, first: int, end: int, pool: SlotPool[SlotBatch]) -> None:
        self._next = first
        self._end = end
        self._pool = pool
        self._lock = threading.Lock()
        self.produced = 0

    def take(self) -> tuple[int, SlotBatch] | None:
        """The next place and its slot, or None after the last; waits until the slot is free."""
        with self._lock:
            if self._next >= self._end:
                return None
            place = self._next
            self._next += 1
        slot = self._pool.acquire(place)
        with self._lock:
            self.produced += 1
        return place, slot


class ReaderStage:
    """Builds micro-batches: tokens, packing, anchors."""

    def __init__(
        self, name: str, numbers: NumberSource, batch_at: Callable[[int], MicroBatch], outbox: Channel[Work]
    ) -> None:
        """``batch_at`` makes the micro-batch of a place."""
        self.name = name
        self._numbers = numbers
        self._batch_at = batch_at
        self._outbox = outbox

    def setup(self) -> None:
        """Nothing to load: the store is memory-mapped."""

    def run(self) -> None:
        """Until the last number has been handed out."""
        while (taken := self._numbers.take()) is not None:
            place, slot = taken
            self._outbox.send(Work(self._batch_at(place), slot, place))
        self._outbox.close()

    def teardown(self) -> None:
        """Nothing to release."""


class TargetStage:
    """Runs the frozen target up to its last tap, in its own stream."""

    def __init__(
        self,
        name: str,
        load: Callable[[], FeatureSource],
        taps: Sequence[int],
        inbox: Channel[Work],
        ends: TargetEnds,
    ) -> None:
        self.name = name
        self._taps = taps
        self._has_checked = False
        self._load = load
        self._inbox = inbox
        self._ends = ends
        self._target: FeatureSource | None = None

    def setup(self) -> None:
        """Load the weights, compile, capture."""
        self._target = self._load()

    def run(self) -> None:
        """Until the readers are done."""
        target = self._target
        assert target is not None
        with StreamContext(target.device) as stream:
            for number, work in enumerate(self._inbox):
                if number >= OUTPUT_SETS:
                    self._ends.read.receive().take()  # the features of two micro-batches ago have been copied away
                with stream.named(self.name):
                    features = target.features(work.batch)
                if not self._has_checked:
                    check_taps(features[: len(self._taps)], self._taps, work.batch)
                    self._has_checked = True
                self._ends.out.send(Captured(work, stream.handoff(features, lent=target.lends)))
        self._ends.out.close()

    def teardown(self) -> None:
        """Let go of the weights."""
        self._target = None


class PostStage:
    """Moves features into the slot and hands the slot to its drafter, off the target's critical path."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        ends: TargetEnds,
        outbox: OrderedChannel[Handoff[SlotBatch]],
        transport: Choice,
    ) -> None:
        self.name = name
        self._device = device
        self._ends = ends
        self._outbox = outbox
        self._choice: Choice = transport
        self._transports: dict[torch.device, Transport] = {}

    def setup(self) -> None:
        """Nothing to load."""

    def run(self) -> None:
        """Until the target is done."""
        for captured in self._ends.out:
            slot = captured.work.slot
            with StreamContext(slot.input_ids.device, peer=self._device) as stream, stream.named(self.name):
                stream.reuse(slot)
                features = captured.features.take()
                fill_slot(slot, captured.work.batch, features, self._transport(slot.input_ids.device, len(features)))
                self._ends.read.send(stream.handoff(None))
                self._outbox.send(captured.work.place, stream.handoff(slot))
        self._outbox.close()

    def teardown(self) -> None:
        """Let go of the host's buffers."""
        self._transports = {}

    def _transport(self, device: torch.device, num_features: int) -> Transport:
        if device not in self._transports:
            self._transports[device] = choose_transport(self._choice, self._device, device, num_features)
        return self._transports[device]


def fill_slot(
    slot: SlotBatch, batch: MicroBatch, features: Sequence[Tensor], transport: Transport | None = None
) -> None:
    """Copy a micro-batch and its features, K taps and perhaps the last hidden state, to the slot's fixed addresses.

    Documents with features that are not finite are left out there.
    """
    num_taps, transport = len(slot.features), transport or Direct()
    for destination, source in zip(slot.features, features[:num_taps], strict=True):
        transport.copy(destination, source)
    if slot.last_hidden is not None:
        transport.copy(slot.last_hidden, features[num_taps])
    for name in ("input_ids", "position_ids", "document_ids", "loss_mask", "anchors", "anchor_valid"):
        getattr(slot, name).copy_(getattr(batch, name), non_blocking=True)
    if slot.number is not None:
        slot.number.fill_(batch.seq)
    slot.batch = batch
    leave_out_bad(slot)


def make_slot(
    batch_shape: tuple[int, int, int], num_taps: int, width: int, device: torch.device, dtype: torch.dtype
) -> SlotBatch:
    """Allocate one slot. ``batch_shape`` is (R, S, A); ``width`` is H."""
    rows, tokens, anchors = batch_shape

    def zeros(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    return SlotBatch(
        features=[zeros((rows, tokens, width), dtype) for _ in range(num_taps)],
        input_ids=zeros((rows, tokens), torch.int64),
        position_ids=zeros((rows, tokens), torch.int64),
        document_ids=zeros((rows, tokens), torch.int32),
        loss_mask=zeros((rows, tokens), torch.bool),
        anchors=zeros((rows, anchors), torch.int64),
        anchor_valid=zeros((rows, anchors), torch.bool),
        number=zeros((), torch.int64),
    )
