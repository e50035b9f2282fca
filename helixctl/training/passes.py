"""One training pass: loss and backward of a slot, launched kernel by kernel or replayed from a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from helixctl.data.batch import SlotBatch
from helixctl.models.captured import Captured, GraphPool
from helixctl.models.drafters._terms import LossTerms

logger = logging.getLogger(__name__)


class _Loss(Protocol):
    def __call__(self, slot: SlotBatch) -> LossTerms: ...


class TrainPass:
    """Adds a slot's gradients to the parameters' and gives its sums. For one thread."""

    def __init__(self, loss: _Loss, autocast: Callable[[], AbstractContextManager[object]], rows: int) -> None:
        """``rows`` go through forward and backward together; they divide the slot's."""
        self._loss = loss
        self._rows = rows
        self._autocast = autocast
        self._captured: dict[int, Captured[dict[str, Tensor]]] = {}

    @property
    def num_captured(self) -> int:
        """Slots whose pass is replayed."""
        return len(self._captured)

    def __call__(self, slot: SlotBatch) -> dict[str, Tensor]:
        """Additive float32 scalars: loss_num, loss_den and the metrics; read them before the next call."""
        captured = self._captured.get(id(slot))
        return self._run(slot) if captured is None else captured.replay()

    def capture(self, slots: Sequence[SlotBatch], device: torch.device) -> None:
        """Replay from now on for these slots, whose tensors keep their addresses and whose gradients exist.

        What no graph can hold stays as it was, and the log says so.
        """
        pool = GraphPool(device)
        for slot in slots:
            try:
                self._captured[id(slot)] = pool.capture(partial(self._run, slot))
            except RuntimeError as error:
                reason = str(error).strip().partition("\n")[0]
                logger.warning("the drafter's step is not captured in a CUDA graph: %s", reason)
                self._captured.clear()
                return

    def _run(self, slot: SlotBatch) -> dict[str, Tensor]:
        first, *others = (self._run_part(part) for part in slot.parts(self._rows))
        values = list(first.values())
        for other in others:  # not in place: two sums of a part may be one tensor
            values = list(torch._foreach_add(values, [other[name] for name in first]))
        return dict(zip(first, values, strict=True))

    def _run_part(self, slot: SlotBatch) -> dict[str, Tensor]:
        with self._autocast():
            terms = self._loss(slot)
        # On this thread: what is compiled there and its settings are this thread's own.
        with torch.autograd.set_multithreading_enabled(False):
            terms.numerator.backward()
        return {"loss_num": terms.numerator.detach(), "loss_den": terms.denominator, **terms.sums}
