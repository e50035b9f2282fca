"""What the decode loop needs from a drafter, a target and a cache: structural protocols, no implementation.

Legend: R rows, T tokens per row in one call, B block_size, K taps, H target width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class DraftPolicy(Protocol):
    """A drafter that decodes: it keeps a context per row and proposes the rest of a block.

    Rows are independent and addressed by position: what `extend` writes at a position replaces what stood there, and
    `draft` for an anchor at position p uses context positions below p only. A row can therefore be given to another
    prompt by extending it from position 0, without any reset.
    """

    @property
    def block_size(self) -> int:
        """B, the anchor included."""

    def start(self, num_rows: int, max_len: int) -> None:
        """Make room for `num_rows` rows of positions below `max_len`; forgets any earlier context."""

    def extend(self, features: Sequence[Tensor], positions: Tensor, valid: Tensor) -> None:
        """Add target features K x [R, T, H] at `positions` [R, T] int64 to the context where `valid` [R, T] is true."""

    def draft(self, anchor_ids: Tensor, positions: Tensor) -> Tensor:
        """Propose the B-1 tokens after `anchor_ids` [R] int64, which stand at `positions` [R]: [R, B-1] int64."""


class RowCache(Protocol):
    """Keys and values of R rows; a key is visible to a query at position p iff its own position is at most p."""

    def select(self, rows: Tensor) -> None:
        """Keep only `rows` [R'] int64, in this order."""

    def put(self, rows: Tensor, other: RowCache) -> None:
        """Copy the rows of `other`, which may be shorter, to `rows` [R'] of this cache, from position 0 on."""


class DecodeTarget(Protocol):
    """The frozen model as the decode loop sees it."""

    @property
    def device(self) -> torch.device:
        """Where ids and positions must be."""

    def new_cache(self, num_rows: int, max_len: int) -> RowCache:
        """An empty cache for positions below `max_len`."""

    def decode_step(
        self, input_ids: Tensor, positions: Tensor, cache: RowCache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run [R, T] int64 tokens at `positions` [R, T] and write them to the cache.

        Returns:
            Logits [R, T, V], or [R, 1, V] of column `logits_at` [R] of each row; K x [R, T, H] features.
        """
