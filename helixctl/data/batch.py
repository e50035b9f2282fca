"""What travels through the pipeline: a micro-batch of packed rows, and the same micro-batch inside a slot.

Legend: R rows, S tokens per row (``seq_len``), A anchors per row (``num_anchors``), K taps, H target width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

Role = Literal["train", "validation"]


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the pipeline together; all tensors on the CPU, never changed after creation."""

    seq: int
    """Place in the run's one sequence of micro-batches, training and validation together."""
    role: Role
    index: int
    """Place among the micro-batches of its role (validation: within its pass)."""
    epoch: int
    """Epoch of the first row."""
    input_ids: Tensor  # [R, S] int64
    position_ids: Tensor  # [R, S] int64, restart at 0 in every document
    document_ids: Tensor  # [R, S] int32, 0, 1, ... within a row; -1 on padding
    loss_mask: Tensor  # [R, S] bool, supervised tokens
    anchors: Tensor  # [R, A] int64, sorted within a row; 0 where invalid
    anchor_valid: Tensor  # [R, A] bool
    documents: tuple[tuple[int, ...], ...]
    """Store indices of the documents of each row, in order."""
    spans: tuple[tuple[tuple[int, int], ...], ...]
    """Per row, the [start, end) of every document, in order; padding is in none."""

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding excluded."""
        return sum(end - start for row in self.spans for start, end in row)

    def pinned(self) -> MicroBatch:
        """The same micro-batch in page-locked memory, from which a GPU copies while the host goes on."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {name: v.pin_memory() for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


def make_document_batch(
    input_ids: Tensor, loss_mask: Tensor | None = None, anchors: Sequence[int] = (), num_anchors: int = 1
) -> MicroBatch:
    """A micro-batch of one row that holds one document, outside of any run.

    Args:
        input_ids: [S] int64.
        loss_mask: [S] bool; None supervises everything.
        anchors: sorted positions, at most ``num_anchors``.
        num_anchors: A.
    """
    length, used = len(input_ids), len(anchors)
    places = torch.zeros((1, num_anchors), dtype=torch.int64)
    places[0, :used] = torch.tensor(anchors, dtype=torch.int64)
    return MicroBatch(
        seq=0,
        role="validation",
        index=0,
        epoch=0,
        input_ids=input_ids[None],
        position_ids=torch.arange(length)[None],
        document_ids=torch.zeros((1, length), dtype=torch.int32),
        loss_mask=torch.ones((1, length), dtype=torch.bool) if loss_mask is None else loss_mask[None],
        anchors=places,
        anchor_valid=(torch.arange(num_anchors) < used)[None],
        documents=((0,),),
        spans=(((0, length),),),
    )


def make_row_batch(documents: Sequence[Tensor]) -> MicroBatch:
    """A micro-batch of one row outside of any run: ``documents``, each [length] int64, one behind the other."""
    ends = list(accumulate(len(document) for document in documents))
    return replace(
        make_document_batch(torch.cat([*documents])),
        position_ids=torch.cat([torch.arange(len(document)) for document in documents])[None],
        document_ids=torch.repeat_interleave(torch.tensor([len(document) for document in documents]))[None].int(),
        documents=(tuple(range(len(documents))),),
        spans=(tuple(pairwise([0, *ends])),),
    )


@dataclass
class SlotBatch:
    """The micro-batch as a drafter sees it: tensors of fixed shape and address on the drafter's device.

    Written by a target's postprocess thread, read by one drafter, reused for a later micro-batch.
    """

    features: list[Tensor]  # K x [R, S, H]
    input_ids: Tensor  # [R, S] int64
    position_ids: Tensor  # [R, S] int64
    document_ids: Tensor  # [R, S] int32
    loss_mask: Tensor  # [R, S] bool
    anchors: Tensor  # [R, A] int64
    anchor_valid: Tensor  # [R, A] bool
    last_hidden: Tensor | None = None  # [R, S, H], after the last layer, before the final norm
    bad: Tensor | None = None  # [R, S] bool, tokens of documents that are left out: their features are not finite
    number: Tensor | None = None  # [] int64, the micro-batch's ``seq``
    batch: MicroBatch | None = field(default=None, repr=False)
    """The micro-batch that now fills the slot (its CPU tensors and numbers)."""
    done: torch.cuda.Event | None = field(default=None, repr=False)
    """Recorded when the drafter has read the slot for the last time; the next writer waits on it."""
    first_row: int = 0
    """Row of the micro-batch that row 0 is; other than 0 in a part."""

    def parts(self, rows: int) -> list[SlotBatch]:
        """The slot in groups of ``rows`` rows, which divide R: views, no copies."""
        count = len(self.input_ids)
        return [self] if rows >= count else [self._part(i, i + rows) for i in range(0, count, rows)]

    def _part(self, first: int, end: int) -> SlotBatch:
        per_row = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "number"}
        views: dict[str, Any] = {name: v[first:end] for name, v in per_row.items() if isinstance(v, Tensor)}
        return replace(self, **views, features=[feature[first:end] for feature in self.features], first_row=first)
