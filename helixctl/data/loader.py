"""Makes micro-batches from a store: number in, packed rows with anchors out.

R rows, S tokens per row, A anchors per row. A batch is a pure function of (seed, number): which thread asks, in which
order, how often and from which loader object makes no difference, so a resumed run gets the same batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from helixctl.data.anchors import draw_anchors
from helixctl.data.batch import MicroBatch
from helixctl.data.packing import NO_CURRICULUM, RowStream, StreamRow, pack
from helixctl.data.sequence import Sequence
from helixctl.data.store import Split
from helixctl.errors import DataError
from helixctl.recipe.schema import CurriculumOptions

_TRAIN_KEY = 2
_VALIDATION_KEY = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoaderOptions:
    """What of the recipe and the plan decides a batch."""

    seed: int
    seq_len: int
    rows: int
    """Rows per micro-batch."""
    num_anchors: int
    """Anchor slots per row."""
    anchors_per_document: int | None = None
    """At most so many of a training document."""
    packing: bool = True
    """Several documents per row; off: one, for targets that cannot keep documents apart."""
    pad_id: int = 0
    """Fills the end of a row; never supervised, in no document."""
    curriculum: CurriculumOptions = NO_CURRICULUM
    """Order of training documents by their length."""


class _Rows:
    """Rows of one split: document numbers inside are positions in ``documents``, the trainable ones."""

    def __init__(self, split: Split, options: LoaderOptions, name: str) -> None:
        self.split = split
        self.documents = split.trainable(options.seq_len)
        if self.documents.size == 0:
            raise DataError(
                f"no {name} document has two supervised tokens in a row within its first {options.seq_len} tokens",
                fix="raise data.seq_len" if split.num_documents else f"give the recipe {name} documents",
            )
        self.lengths = split.lengths[self.documents]


class BatchLoader:
    """Batches of a run by their number; any number of threads may call ``batch``.

    Documents without an eligible anchor before ``seq_len`` are left out; ``num_left_out`` counts them. Training rows
    are those of epoch 0, 1, 2, ..., each epoch in its own order. Validation rows stand in store order with anchors
    that never change; a pass that asks for more rows than there are begins again at the first.
    """

    def __init__(self, train: Split, validation: Split | None, sequence: Sequence, options: LoaderOptions) -> None:
        """``validation`` may be None where ``sequence`` has no passes.

        Raises:
            DataError: a split that the sequence needs has nothing to train on.
        """
        self.options = options
        self.sequence = sequence
        self._train = _Rows(train, options, "training")
        self._stream = RowStream(
            self._train.lengths,
            options.seq_len,
            seed=options.seed,
            packing=options.packing,
            curriculum=options.curriculum,
        )
        self._validation: _Rows | None = None
        self._validation_rows: list[tuple[int, ...]] = []
        if sequence.total_passes:
            if validation is None:
                raise DataError(
                    "validation is on, but there are no held-out documents", fix="set validation.every_steps: 0"
                )
            self._validation = _Rows(validation, options, "validation")
            order = np.arange(self._validation.documents.size)
            rows = pack(self._validation.lengths, options.seq_len, order, options.packing)
            self._validation_rows = sorted(rows)  # full rows are packed first; a short pass must not see only those
            self._say_whether_rows_repeat()

    @property
    def num_left_out(self) -> int:
        """Training documents whose supervised tokens all lie behind ``seq_len``."""
        return self._train.split.num_documents - int(self._train.documents.size)

    @property
    def num_validation_rows(self) -> int:
        """Distinct validation rows; a pass may ask for more and then sees some twice."""
        return len(self._validation_rows)

    def first_row(self, epoch: int) -> int:
        """Training rows before ``epoch``: ``first_row(n)`` is what n epochs hold together."""
        return self._stream.first_row(epoch)

    def first_epoch(self) -> Iterator[tuple[int, int, int]]:
        """Every training document of epoch 0, in order: ``index`` of its micro-batch, its number, its tokens."""
        for row in self._stream.rows(0, self.first_row(1)):
            for position in row.documents:
                num_tokens = min(int(self._train.lengths[position]), self.options.seq_len)
                yield row.place // self.options.rows, int(self._train.documents[position]), num_tokens

    def batch(self, seq: int) -> MicroBatch:
        """Micro-batch number ``seq`` of the run.

        Raises:
            IndexError: ``seq`` is outside of the run.
        """
        role, place = self.sequence.entry(seq)
        start, stop = place * self.options.rows, (place + 1) * self.options.rows
        if role == "train":
            source, key, rows = self._train, _TRAIN_KEY, self._stream.rows(start, stop)
        else:
            assert self._validation is not None
            source, key = self._validation, _VALIDATION_KEY
            count = len(self._validation_rows)
            rows = [StreamRow(0, i % count, self._validation_rows[i % count]) for i in range(start, stop)]
        arrays = _RowArrays.empty(self.options)
        spans = tuple(self._fill(arrays, i, source, row) for i, row in enumerate(rows))
        for i, row in enumerate(rows):
            rng = np.random.default_rng([self.options.seed, key, row.epoch, row.place])
            most = self.options.anchors_per_document if role == "train" else None  # passes stay comparable
            drawn = draw_anchors(arrays.loss_mask[i], arrays.document_ids[i], self.options.num_anchors, rng, most)
            arrays.anchors[i], arrays.anchor_valid[i] = drawn
        return MicroBatch(
            seq=seq,
            role=role,
            index=place,
            epoch=rows[0].epoch,
            documents=tuple(tuple(source.documents[list(row.documents)].tolist()) for row in rows),
            spans=spans,
            **arrays.tensors(),
        )

    def _fill(self, arrays: _RowArrays, i: int, source: _Rows, row: StreamRow) -> tuple[tuple[int, int], ...]:
        """Write the documents of ``row`` into row ``i``; returns their [start, end)."""
        spans = []
        start = 0
        for number, position in enumerate(row.documents):
            document = int(source.documents[position])
            length = min(int(source.lengths[position]), self.options.seq_len)
            end = start + length
            arrays.input_ids[i, start:end] = source.split.tokens(document)[:length]
            arrays.loss_mask[i, start:end] = source.split.loss_mask(document)[:length]
            arrays.position_ids[i, start:end] = np.arange(length)
            arrays.document_ids[i, start:end] = number
            spans.append((start, end))
            start = end
        return tuple(spans)

    def _say_whether_rows_repeat(self) -> None:
        asked = self.sequence.validation_batches * self.options.rows
        if asked > len(self._validation_rows):
            _log.warning(
                "a validation pass asks for %d rows, the held-out documents fill %d: some are counted more than once",
                asked,
                len(self._validation_rows),
            )


@dataclass(frozen=True)
class _RowArrays:
    input_ids: NDArray[np.int64]  # [R, S]
    position_ids: NDArray[np.int64]  # [R, S]
    document_ids: NDArray[np.int32]  # [R, S]
    loss_mask: NDArray[np.bool_]  # [R, S]
    anchors: NDArray[np.int64]  # [R, A]
    anchor_valid: NDArray[np.bool_]  # [R, A]

    @classmethod
    def empty(cls, options: LoaderOptions) -> _RowArrays:
        """Rows that hold nothing but padding."""
        tokens, anchors = (options.rows, options.seq_len), (options.rows, options.num_anchors)
        return cls(
            input_ids=np.full(tokens, options.pad_id, np.int64),
            position_ids=np.zeros(tokens, np.int64),
            document_ids=np.full(tokens, -1, np.int32),
            loss_mask=np.zeros(tokens, np.bool_),
            anchors=np.zeros(anchors, np.int64),
            anchor_valid=np.zeros(anchors, np.bool_),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The same memory as tensors, by the names of MicroBatch."""
        return {name: torch.from_numpy(array) for name, array in vars(self).items()}
