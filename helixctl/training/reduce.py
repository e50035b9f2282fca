"""Sums over the drafters of one step: gradients, loss weights and metric sums.

Drafters of one process meet at an engine ``Meeting``; the first of them adds up in the order of the lanes, so the
result does not depend on who arrives first, adds up with the other processes, and hands the result to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from helixctl.engine.meeting import Meeting
from helixctl.training.processes import Processes


class Reducer(Protocol):
    """Joins the drafters of a step."""

    def sum_(self, lane: int, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over all drafters; returns when all have it."""

    def any(self, lane: int, flag: bool) -> bool:
        """True for all drafters if it is true for one."""


class SingleDrafter:
    """One drafter in this process: it adds up with those of the other processes, if there are any."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def sum_(self, lane: int, tensors: Sequence[Tensor]) -> None:
        """The sum over the processes."""
        self._processes.sum_(tensors)

    def any(self, lane: int, flag: bool) -> bool:
        """True if it is true in one process."""
        return self._processes.any(flag)


class ProcessDrafters:
    """Several drafters in one process. The copy between devices runs on the meeting's leader."""

    def __init__(self, num_drafters: int, processes: Processes) -> None:
        self._processes = processes
        self.meeting: Meeting[object, object] = Meeting("drafters", num_drafters)
        """Cancelled together with the channels."""

    def sum_(self, lane: int, tensors: Sequence[Tensor]) -> None:
        """Add up in lane order on lane 0's device, then hand the sum to every lane."""
        _finish_device_work(tensors)
        self.meeting.meet(lane, tensors, self._add_up)
        self.meeting.meet(lane, tensors, _nothing)  # nobody touches its tensors before all have read them

    def any(self, lane: int, flag: bool) -> bool:
        """True for all drafters if it is true for one."""
        return bool(self.meeting.meet(lane, flag, lambda flags: self._processes.any(any(bool(f) for f in flags))))

    def _add_up(self, lanes: Sequence[object]) -> None:
        parts: list[Sequence[Tensor]] = list(lanes)  # type: ignore[arg-type]
        columns = list(zip(*parts, strict=True))
        for total, *others in columns:
            for other in others:
                total += other.to(total.device)
        self._processes.sum_(parts[0])
        for total, *others in columns:
            for other in others:
                other.copy_(total)
        _finish_device_work(parts[0])


def _nothing(lanes: Sequence[object]) -> None:
    return None


def _finish_device_work(tensors: Sequence[Tensor]) -> None:
    """A step boundary of several devices in one process is the one place that waits for the device."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
