"""How often each document of a weighted source stands in an epoch: exactly as often, all in all, as the weight says.

With weight w every document stands there floor(w) times, and some once more, so that of the first n there are w * n
entries, rounded to the next whole number, at the end of every block. Which of a block have one more is decided by their
content, not by their place, so that a file whose documents alternate is not sampled one-sidedly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

from helixctl.data.documents import hash_fraction

BLOCK_DOCUMENTS = 256
"""Documents that are looked at together."""
_DRAW = 1
"""Draw 0 of a digest decides the split."""

T = TypeVar("T")


class Copier:
    """Hands out the copies of one source, block by block."""

    def __init__(self, weight: float) -> None:
        self.weight = Fraction(str(weight))  # the number that was written, not the nearest binary one
        self.num_documents = 0
        """Seen so far."""

    @property
    def is_even(self) -> bool:
        """Every document stands there equally often."""
        return self.weight.denominator == 1

    @property
    def num_entries(self) -> int:
        """Copies of the documents seen so far: weight * num_documents, rounded half up."""
        return _rounded(self.weight * self.num_documents)

    def copies(self, digests: Sequence[bytes]) -> list[int]:
        """Copies of the next documents, by the digests of their content."""
        whole = self.weight.numerator // self.weight.denominator
        before = self.num_entries
        self.num_documents += len(digests)
        num_more = self.num_entries - before - whole * len(digests)
        drawn = sorted(range(len(digests)), key=lambda i: (hash_fraction(digests[i], _DRAW), i))
        more = set(drawn[:num_more])
        return [whole + (i in more) for i in range(len(digests))]


def blocks(items: Iterable[T]) -> Iterator[list[T]]:
    """Runs of ``BLOCK_DOCUMENTS`` items; the last may be shorter."""
    block: list[T] = []
    for item in items:
        block.append(item)
        if len(block) == BLOCK_DOCUMENTS:
            yield block
            block = []
    if block:
        yield block


def weight_for(share: float, own_tokens: int, other_tokens: int) -> float:
    """The weight with which a source of ``own_tokens`` makes up ``share`` of all, beside ``other_tokens``."""
    return share * other_tokens / (own_tokens * (1.0 - share))


def _rounded(number: Fraction) -> int:
    return int((2 * number + 1) // 2)
