"""Documents into rows: the order of an epoch, which documents share a row, and the endless stream of rows.

Everything is a pure function of (seed, epoch) and of the documents' lengths. Documents are never split over rows: one
that is longer than a row is cut at ``seq_len``.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helixctl.recipe.schema import CurriculumOptions

Row = tuple[int, ...]
"""Documents of one row, in the order in which they stand in it."""

_OPEN_ROWS = 64
_CACHED_EPOCHS = 2
_ORDER_KEY = 1
_CURRICULUM_KEY = 4
NO_CURRICULUM = CurriculumOptions()


def epoch_order(seed: int, epoch: int, num_documents: int) -> NDArray[np.int64]:
    """A permutation of ``range(num_documents)``, int64 [num_documents], drawn anew for every epoch."""
    rng = np.random.default_rng([seed, _ORDER_KEY, epoch])
    return rng.permutation(num_documents)


def length_order(
    lengths: NDArray[np.integer], order: NDArray[np.int64], spread: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The documents of ``order`` from short to long, mixed.

    Args:
        lengths: tokens of every document, by document index.
        order: document indices; decides between documents of one length.
        spread: a document is moved back by up to this share of them all.
        rng: draws how far.

    Returns:
        int64, like ``order``. No document stands before one that is shorter by more than ``spread`` in rank.
    """
    rank = np.empty(order.size)
    rank[np.argsort(lengths[order], kind="stable")] = np.arange(order.size) / max(1, order.size)
    return order[np.argsort(rank + spread * rng.random(order.size), kind="stable")]


def pack(
    lengths: Sequence[int] | NDArray[np.integer],
    seq_len: int,
    order: Sequence[int] | NDArray[np.integer],
    packing: bool,
) -> list[Row]:
    """Rows of at most ``seq_len`` tokens that hold every document of ``order`` exactly once.

    Best fit over a bounded number of open rows, so that rows are full and yet hold documents from near each other in
    ``order``. ``packing`` off gives one document per row.

    Args:
        lengths: tokens of every document, by document index.
        seq_len: tokens per row; longer documents count as ``seq_len``.
        order: document indices.
        packing: several documents per row.
    """
    if not packing:
        return [(int(document),) for document in order]
    clipped = np.minimum(np.asarray(lengths), seq_len).tolist()
    rows: list[Row] = []
    free: list[tuple[int, int]] = []  # (free tokens, row number), sorted
    contents: dict[int, list[int]] = {}
    for row_number, document in enumerate(np.asarray(order).tolist()):
        length = clipped[document]
        place = bisect_left(free, (length, -1))
        if place < len(free):
            room, row = free.pop(place)
        else:
            room, row = seq_len, row_number
            contents[row] = []
        contents[row].append(document)
        if room > length:
            insort(free, (room - length, row))
        else:
            rows.append(tuple(contents.pop(row)))
        if len(free) > _OPEN_ROWS:
            rows.append(tuple(contents.pop(free.pop(0)[1])))
    return rows + [tuple(documents) for documents in contents.values()]


class StreamRow(NamedTuple):
    """One row of the stream."""

    epoch: int
    place: int
    """Place of the row within its epoch."""
    documents: Row


class RowStream:
    """The rows of epoch 0, 1, 2, ... one behind the other; an epoch's tail joins the next epoch.

    Any thread may ask for any rows; only the last few epochs are kept, older ones are packed again when asked for.
    """

    def __init__(
        self,
        lengths: NDArray[np.integer],
        seq_len: int,
        *,
        seed: int,
        packing: bool,
        curriculum: CurriculumOptions = NO_CURRICULUM,
    ) -> None:
        """``lengths`` int [documents]: tokens of every document."""
        if lengths.size == 0:
            raise ValueError("a stream of rows needs at least one document")
        self._lengths = np.minimum(lengths, seq_len)
        self._seq_len = seq_len
        self._seed = seed
        self._packing = packing
        self._curriculum = curriculum
        self._lock = threading.Lock()
        self._epochs: OrderedDict[int, list[Row]] = OrderedDict()
        self._first_row = [0]  # of every epoch packed so far

    def rows(self, start: int, stop: int) -> list[StreamRow]:
        """Rows ``start`` to ``stop`` (excluded) of the stream."""
        with self._lock:
            return list(self._walk(start, stop))

    def first_row(self, epoch: int) -> int:
        """Number of rows before ``epoch``; ``first_row(n)`` is what n epochs hold together."""
        with self._lock:
            return self._find_first_row(epoch)

    def _walk(self, start: int, stop: int) -> Iterator[StreamRow]:
        while self._first_row[-1] <= start:
            self._find_first_row(len(self._first_row))
        epoch = bisect_left(self._first_row, start + 1) - 1
        while start < stop:
            rows = self._pack(epoch)
            offset = start - self._find_first_row(epoch)
            taken = rows[offset : offset + stop - start]
            yield from (StreamRow(epoch, offset + i, row) for i, row in enumerate(taken))
            start += len(taken)
            epoch += 1

    def _find_first_row(self, epoch: int) -> int:
        while len(self._first_row) <= epoch:
            self._first_row.append(self._first_row[-1] + len(self._pack(len(self._first_row) - 1)))
        return self._first_row[epoch]

    def _pack(self, epoch: int) -> list[Row]:
        if epoch not in self._epochs:
            self._epochs[epoch] = pack(self._lengths, self._seq_len, self._order(epoch), self._packing)
            while len(self._epochs) > _CACHED_EPOCHS:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        order = epoch_order(self._seed, epoch, self._lengths.size)
        if epoch >= self._curriculum.epochs:
            return order
        rng = np.random.default_rng([self._seed, _CURRICULUM_KEY, epoch])
        return length_order(self._lengths, order, self._curriculum.spread, rng)
