"""Sums over the drafters of one step: gradients, loss weights and metric sums.

Drafters of one process meet at an engine ``Meeting``; one of them adds up in the order of the lanes, so the result
does not depend on who arrives first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from helixctl.engine.meeting import Meeting


class Reducer(Protocol):
    """Joins the drafters of a step."""

    def sum_(self, lane: int, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over all drafters; returns when all have it."""

    def any(self, lane: int, flag: bool) -> bool:
        """True for all drafters if it is true for one."""


class SingleDrafter:
    """One drafter, one process: nothing to add up."""

    def sum_(self, lane: int, tensors: Sequence[Tensor]) -> None:
        """The sum over one drafter."""

    def any(self, lane: int, flag: bool) -> bool:
        """The flag itself."""
        return flag


class ProcessDrafters:
    """Several drafters in one process. The copy between devices runs on the meeting's leader."""

    def __init__(self, num_drafters: int) -> None:
        self.meeting: Meeting[object, object] = Meeting("drafters", num_drafters)
        """Cancelled together with the channels."""

    def sum_(self, lane: int, tensors: Sequence[Tensor]) -> None:
        """Add up in lane order on lane 0's device, then hand the sum to every lane."""
        _finish_device_work(tensors)
        self.meeting.meet(lane, tensors, _add_up)
        self.meeting.meet(lane, tensors, _nothing)  # nobody touches its tensors before all have read them

    def any(self, lane: int, flag: bool) -> bool:
        """True for all drafters if it is true for one."""
        return bool(self.meeting.meet(lane, flag, lambda flags: any(bool(f) for f in flags)))


def _add_up(lanes: Sequence[object]) -> None:
    parts: list[Sequence[Tensor]] = list(lanes)  # type: ignore[arg-type]
    for column in zip(*parts, strict=True):
        total = column[0]
        for other in column[1:]:
            total += other.to(total.device)
        for other in column[1:]:
            other.copy_(total)
    _finish_device_work(parts[0])


def _nothing(lanes: Sequence[object]) -> None:
    return None


def _finish_device_work(tensors: Sequence[Tensor]) -> None:
    """A step boundary of several devices in one process is the one place that waits for the device."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
