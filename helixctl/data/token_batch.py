"""What a loader for causal language models hands out: rows of tokens with their documents and labels.

R rows, S tokens per row. Masks come from lengths, never from ids: padding may share its id with the end of a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from helixctl.data.windows import Window, WindowOptions

IGNORED = -100


class Place(NamedTuple):
    """Where a stream's lane stands: what comes next."""

    epoch: int
    document: int
    token: int


@dataclass(frozen=True)
class TokenBatch:
    """Rows that go through the model together."""

    input_ids: Tensor  # [R, S] int64
    position_ids: Tensor  # [R, S] int64, restart at 0 in every document
    document_ids: Tensor  # [R, S] int32, 0, 1, ... within a row; -1 on padding
    loss_mask: Tensor  # [R, S] bool, tokens to learn
    num_rows: int
    """Rows that hold something; the others are padding."""
    lane: int = 0
    """Which of the loader's workers made it."""
    place: Place | None = None
    """Streams: where the lane stands behind this batch."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Streams: what became of the lane's documents since its batch before."""

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding excluded."""
        return int((self.document_ids >= 0).sum())

    def labels(self, *, across_documents: bool = False) -> Tensor:
        """``input_ids`` where they are to be learnt, -100 elsewhere, int64 [R, S]; not shifted.

        The first token of a document can only be predicted from the document before; it is left out, unless
        ``across_documents``, for attention that does not keep documents apart.
        """
        learnt = self.loss_mask if across_documents else self.loss_mask & (self.position_ids > 0)
        return torch.where(learnt, self.input_ids, IGNORED)

    def num_targets(self, *, across_documents: bool = False) -> int:
        """Labels that count once the loss has shifted them: what a loss over tokens divides by."""
        return int((self.labels(across_documents=across_documents)[:, 1:] != IGNORED).sum())

    def pin_memory(self) -> TokenBatch:
        """A copy in page-locked memory; called by the loader, in the main process."""
        names = ("input_ids", "position_ids", "document_ids", "loss_mask")
        return replace(self, **{name: getattr(self, name).pin_memory() for name in names})


def make_token_batch(windows: Sequence[Window], options: WindowOptions) -> TokenBatch:
    """At most ``options.rows`` windows, the rest of the rows padding."""
    shape = (options.rows, options.seq_len)
    ids, positions = np.full(shape, options.pad_id, np.int64), np.zeros(shape, np.int64)
    documents, mask = np.full(shape, -1, np.int32), np.zeros(shape, np.bool_)
    for row, window in enumerate(windows):
        start = 0
        for number, piece in enumerate(window):
            end = start + len(piece.input_ids)
            ids[row, start:end], mask[row, start:end] = piece
            positions[row, start:end] = np.arange(end - start)
            documents[row, start:end] = number
            start = end
    ids_, positions_, documents_, mask_ = (torch.from_numpy(array) for array in (ids, positions, documents, mask))
    return TokenBatch(ids_, positions_, documents_, mask_, num_rows=len(windows))
