"""Micro-batches of windows for causal LMs: number in, rows out, by arithmetic.

As ``loader.py`` does for drafters, a batch is a pure function of (seed, number). The training stages of a run stand one
behind the other in its one sequence of micro-batches; each has its own documents, or its own order of the same ones.

Legend: R rows, S tokens per row.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence as Listed
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from helixctl.data.batch import MicroBatch
from helixctl.data.sequence import Sequence
from helixctl.data.token_batch import make_token_batch
from helixctl.data.window_set import Windows
from helixctl.errors import DataError

_CACHED_ORDERS = 2


@dataclass(frozen=True)
class StageWindows:
    """What one training stage reads."""

    first_step: int
    train: Windows
    validation: Windows | None
    """None where no document is held out: rows of validation batches are then empty."""


class WindowLoader:
    """Batches of a run by their number; any number of threads may call ``batch``.

    Every epoch of a stage holds every window once, in an order of its own; its tail joins the next epoch. Validation
    windows stand in the order of the store. A pass that asks for more rows than there are gets empty ones, so that its
    sums count every token once.
    """

    def __init__(self, stages: Listed[StageWindows], sequence: Sequence, rows: int) -> None:
        """``rows``: R, per micro-batch.

        Raises:
            DataError: validation is on, and no stage has a held-out document.
        """
        self._stages = tuple(stages)
        self._sequence = sequence
        self._rows = rows
        self._first_steps = [stage.first_step for stage in stages]
        self._lock = threading.Lock()
        self._orders: OrderedDict[tuple[int, int], NDArray[np.int64]] = OrderedDict()
        if sequence.total_passes and all(stage.validation is None for stage in stages):
            text = "validation is on, but there are no held-out documents"
            raise DataError(text, fix="set validation.every_steps: 0, or raise data.validation.fraction")

    def batch(self, seq: int) -> MicroBatch:
        """Micro-batch number ``seq`` of the run.

        Raises:
            IndexError: ``seq`` is outside of the run.
        """
        role, place = self._sequence.entry(seq)
        number = bisect_right(self._first_steps, self._sequence.step_of(seq)) - 1
        stage, epoch = self._stages[number], 0
        windows: Windows | None = stage.validation
        first = place * self._rows
        if role == "train":
            windows = stage.train
            first -= stage.first_step * self._sequence.batches_per_step * self._rows
            epoch = first // len(windows)
            chosen = [self._window(number, row) for row in range(first, first + self._rows)]
        else:
            held_out = 0 if windows is None else len(windows)
            chosen = list(range(min(first, held_out), min(first + self._rows, held_out)))
        pieces = [] if windows is None else [windows.window(window) for window in chosen]
        tokens = make_token_batch(pieces, stage.train.options)
        none = torch.zeros((self._rows, 0), dtype=torch.int64)
        return MicroBatch(
            seq=seq,
            role=role,
            index=place,
            epoch=epoch,
            input_ids=tokens.input_ids,
            position_ids=tokens.position_ids,
            document_ids=tokens.document_ids,
            loss_mask=tokens.loss_mask,
            anchors=none,
            anchor_valid=none.bool(),
            documents=() if windows is None else tuple(windows.documents(window) for window in chosen),
            spans=tuple(_spans([len(piece.input_ids) for piece in row]) for row in pieces),
        )

    def _window(self, stage: int, row: int) -> int:
        """The window in row ``row`` of a stage, counted through its epochs."""
        epoch, place = divmod(row, len(self._stages[stage].train))
        with self._lock:
            if (stage, epoch) not in self._orders:
                self._orders[stage, epoch] = self._stages[stage].train.order(epoch)
                while len(self._orders) > _CACHED_ORDERS:
                    self._orders.popitem(last=False)
            return int(self._orders[stage, epoch][place])


def _spans(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    ends = np.cumsum(lengths).tolist()
    return tuple(zip([0, *ends[:-1]], ends, strict=True))
