"""What the decode loop needs from a drafter, a target and a cache: structural protocols, and rows as tensors.

Legend: R rows, T tokens per row in one call, B block_size, K taps, H target width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Choose = Callable[[Tensor], Tensor]
"""Tokens [R, T] int64 of the next T slots of every row, from their logits [R, T, V]: the best, or a sample."""


@dataclass(frozen=True, eq=False)
class DraftCall:
    """How a block is drafted."""

    size: int
    """Slots of the block, the anchor included: the drafter sees no others; at most its `block_size`."""
    choose: Choose
    """Called with the logits of slots 1 .. size-1 in order, all at once, or as many as are known at a time."""
    length: int | None = None
    """A bound: no anchor stands beyond this position. None where the caller does not know it on the host; then it must
    be read from the device, which waits for it."""
    tell: Callable[[Tensor], None] | None = None
    """Where given, and the drafter knows: called with the probability [R, T] that each of the next T drafts is accepted
    if those before it are, before `choose` is called for these drafts. So no draft's own draw decides whether it is
    verified, and samples stay exact (`confidence.py`)."""


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

    def draft(self, anchor_ids: Tensor, positions: Tensor, call: DraftCall) -> Tensor:
        """Propose the tokens after `anchor_ids` [R] int64, which stand at `positions` [R]: [R, call.size - 1] int64.

        Every proposal is what `call.choose` made of the logits that it depends on. Sampling is then exact: the loop
        knows what each draft was drawn from.
        """


NextLogits = Callable[[int, Tensor], Tensor]
"""Logits of slot k (slot 0 follows the anchor) behind each of the tokens [R, W] int64 of the slot before: [R, W, V], or
[R, 1, V] where they are the same behind all of them."""


@runtime_checkable
class TreePolicy(DraftPolicy, Protocol):
    """A drafter that can say what follows any of several candidates, and so drafts trees (`tree.py`) too."""

    def branch(self, anchor_ids: Tensor, positions: Tensor, call: DraftCall) -> NextLogits:
        """Begin a block behind `anchor_ids` [R], which stand at `positions` [R]; slots 0 .. call.size - 2 may be asked.

        Nothing is chosen here: `call.choose` is not called.
        """


@dataclass(frozen=True, eq=False)
class Branches:
    """Tokens of one forward that do not all follow each other: where the cache holds them, and what they see of it."""

    places: Tensor
    """[R, T] int64: a row's T places side by side. Whatever stands before the first of them is seen by all tokens."""
    ancestors: Tensor
    """[R, T, T] bool: whether token t sees token s of this forward; itself always."""

    def to(self, device: torch.device) -> Branches:
        """The same on another device."""
        return Branches(self.places.to(device), self.ancestors.to(device))


class RowCache(Protocol):
    """Keys and values of R rows; a key is visible to a query at position p iff its own position is at most p."""

    def select(self, rows: Tensor) -> None:
        """Keep only `rows` [R'] int64, in this order."""

    def put(self, rows: Tensor, other: RowCache, taken: Tensor | None = None) -> None:
        """Copy rows of `other`, which may be shorter, to `rows` [R'] of this cache, from position 0 on.

        `taken` [R'] are the rows of `other`; None is all of them, in order.
        """

    def move(self, sources: Tensor, places: Tensor) -> None:
        """Copy what each row holds at `sources` [R, T] int64 to `places` [R, T], distinct within a row."""

    def expect(self, length: int) -> None:
        """The next forward writes below position `length`: said by the host, so that nobody asks the device."""


class DecodeTarget(Protocol):
    """The frozen model as the decode loop sees it."""

    @property
    def device(self) -> torch.device:
        """Where ids and positions must be."""

    def new_cache(self, num_rows: int, max_len: int) -> RowCache:
        """An empty cache for positions below `max_len`."""

    def decode_step(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: RowCache,
        logits_at: Tensor | None = None,
        branches: Branches | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run [R, T] int64 tokens at `positions` [R, T] and write them to the cache.

        Every token is kept at its position and sees all up to it, unless `branches` say otherwise.

        Returns:
            Logits [R, T, V], or [R, 1, V] of column `logits_at` [R] of each row; K x [R, T, H] features.
        """


def padded_rows(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token rows of any lengths, padded on the right with their own last token: [R, T] int64; and their lengths [R]."""
    width = max(len(row) for row in rows)
    padded = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
    return torch.tensor(padded, device=device), torch.tensor([len(row) for row in rows], device=device)
