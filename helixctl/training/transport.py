"""How features cross from a target's device to a drafter's: straight, or through pinned memory of the host.

All copies are queued, nobody waits on the host. The caller has made its streams on both devices current.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from helixctl.errors import ModelError

Choice = Literal["auto", "peer", "pinned"]


class Transport(Protocol):
    """Copies of one postprocess thread."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Queue the copy of ``source`` into ``destination``, of the same shape and type."""


class Direct:
    """A copy on one device, between peers, or by memcpy on a CPU."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """See ``Transport``."""
        destination.copy_(source, non_blocking=destination.is_cuda)  # a CPU reads what arrived at once


class Pinned:
    """Through a ring of pinned host buffers: device to host on the source's stream, host to device on the other's."""

    def __init__(self, num_buffers: int) -> None:
        self._buffers: list[Tensor | None] = [None] * num_buffers
        self._emptied: list[torch.cuda.Event | None] = [None] * num_buffers
        self._turn = 0

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """See ``Transport``."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._buffers)
        outward = torch.cuda.current_stream(source.device)
        inward = torch.cuda.current_stream(destination.device)
        buffer, emptied = self._buffers[turn], self._emptied[turn]
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = self._buffers[turn] = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        elif emptied is not None:
            outward.wait_event(emptied)
        buffer.copy_(source, non_blocking=True)
        filled = torch.cuda.Event()
        filled.record(outward)
        inward.wait_event(filled)
        destination.copy_(buffer, non_blocking=True)
        emptied = self._emptied[turn] = torch.cuda.Event()
        emptied.record(inward)


def choose_transport(choice: Choice, source: torch.device, destination: torch.device, num_buffers: int) -> Transport:
    """The way from ``source`` to ``destination``; ``choice`` counts only between two GPUs.

    Args:
        choice: ``auto`` is ``peer`` where the devices can, else ``pinned``.
        source: The target's device.
        destination: The drafter's.
        num_buffers: Copies through the host that may be on their way at once.

    Raises:
        ModelError: ``peer`` is asked for and the devices cannot reach each other's memory.
    """
    if "cpu" in (source.type, destination.type) or source == destination:
        return Direct()
    are_peers = torch.cuda.can_device_access_peer(destination, source)
    if choice == "peer" and not are_peers:
        raise ModelError(
            f"{destination} cannot read the memory of {source}", fix="set pipeline.transport to auto or pinned"
        )
    return Direct() if are_peers and choice != "pinned" else Pinned(num_buffers)
