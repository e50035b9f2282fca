"""Tokenised documents as numbered windows, from a store or from lists in memory. Never imports torch.

Which documents a window holds, and the order of the windows of an epoch, are pure functions of (seed, stage, epoch) and
of the documents' lengths: a loader that is asked for window 7 of epoch 3 needs to remember nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from helixctl.data.store import SplitName, Store
from helixctl.data.windows import (
    SHORT,
    TAIL,
    Piece,
    Window,
    WindowOptions,
    count_windows,
    document_window,
    with_end,
)
from helixctl.errors import DataError

_DOCUMENTS_KEY = 13
_WINDOWS_KEY = 14


class Documents(Protocol):
    """Tokenised documents by number."""

    @property
    def lengths(self) -> NDArray[np.integer]:
        """Tokens of every document, [N]."""

    def last_tokens(self) -> NDArray[np.int64]:
        """Last id of every document, [N]; -1 of an empty one."""

    def piece(self, document: int) -> Piece:
        """Ids and mask of one document, without an added end."""


class ListedDocuments:
    """Documents that are in memory."""

    def __init__(self, documents: Iterable[Sequence[int] | NDArray[np.integer]]) -> None:
        """``documents``: ids of each; all of them are to be learnt."""
        arrays = [np.asarray(document, dtype=np.int64) for document in documents]
        self.lengths: NDArray[np.integer] = np.array([len(array) for array in arrays], np.int64)
        self._ends = np.cumsum(self.lengths)
        self._ids = np.concatenate(arrays).astype(np.uint32) if arrays else np.zeros(0, np.uint32)

    def last_tokens(self) -> NDArray[np.int64]:
        """See ``Documents``."""
        last = np.full(self.lengths.size, -1, np.int64)
        last[self.lengths > 0] = self._ids[self._ends[self.lengths > 0] - 1]
        return last

    def piece(self, document: int) -> Piece:
        """See ``Documents``."""
        end = int(self._ends[document])
        ids = self._ids[end - int(self.lengths[document]) : end]
        return Piece(ids, np.ones(len(ids), np.bool_))


class StoredDocuments:
    """One split of a store, opened anew in every process that uses it; training and validation never share files."""

    def __init__(self, store: Path, split: SplitName) -> None:
        self._path = store
        self._name: SplitName = split
        self._split = Store.open(store).split(split)

    @property
    def lengths(self) -> NDArray[np.integer]:
        """See ``Documents``."""
        return self._split.lengths

    def last_tokens(self) -> NDArray[np.int64]:
        """See ``Documents``."""
        return self._split.last_tokens()

    def piece(self, document: int) -> Piece:
        """See ``Documents``."""
        return Piece(self._split.tokens(document), self._split.loss_mask(document))

    def __reduce__(self) -> tuple[type[StoredDocuments], tuple[Path, SplitName]]:
        return StoredDocuments, (self._path, self._name)


class Windows:
    """Windows by number. ``counts`` tells what was left out: ``tail_tokens`` and ``too_short`` documents."""

    def __init__(self, documents: Documents, options: WindowOptions, *, shuffle: bool) -> None:
        """``shuffle``: documents stand in another order in every stage; else in their own.

        Raises:
            DataError: the documents fill no window.
        """
        self._documents = documents
        self.options = options
        lengths = np.asarray(documents.lengths, np.int64)
        order = np.arange(lengths.size)
        if shuffle:
            order = np.random.default_rng([options.seed, options.stage, _DOCUMENTS_KEY]).permutation(order)
        ended = np.asarray(documents.last_tokens())[order] == options.eos_id
        self._order = order[lengths[order] > 0]
        sizes = (lengths[order] + ~ended)[lengths[order] > 0]
        self.counts: dict[str, int] = {SHORT: int((lengths == 0).sum()), TAIL: 0}
        self._continuous = options.packing == "continuous"
        if self._continuous:
            self._ends = np.cumsum(sizes)
            self._num_windows = self._count_continuous(int(sizes.sum()))
        else:
            windows, tails, short = count_windows(sizes, options)
            self._ends = np.cumsum(windows)
            self._num_windows = int(windows.sum())
            self.counts = {SHORT: self.counts[SHORT] + int(short.sum()), TAIL: int(tails.sum())}
        self.num_tokens = int(sizes.sum()) - self.counts[TAIL]
        """Tokens of all documents, their ends included, but for tails that are left out."""
        if self._num_windows == 0:
            text = f"{lengths.size} documents with {int(lengths.sum())} tokens fill no window of {options.seq_len}"
            raise DataError(f"{text} with min_tail_len {options.min_tail_len}", fix="give more, or lower min_tail_len")

    def __len__(self) -> int:
        """Number of windows."""
        return self._num_windows

    def window(self, number: int) -> Window:
        """Window ``number``.

        Raises:
            IndexError: there is none.
        """
        if not 0 <= number < self._num_windows:
            raise IndexError(f"window {number} of {self._num_windows}")
        if self._continuous:
            return tuple(self._cut(number * self.options.seq_len))
        place = int(np.searchsorted(self._ends, number, side="right"))
        first = int(self._ends[place - 1]) if place else 0
        return document_window(self._piece(place), number - first, self.options)

    def documents(self, number: int) -> tuple[int, ...]:
        """Numbers of the documents that window ``number`` holds a piece of, in its order."""
        first = last = number
        if self._continuous:
            first = number * self.options.seq_len
            last = min(first + self.options.seq_len, int(self._ends[-1])) - 1
        places = np.searchsorted(self._ends, [first, last], side="right")
        return tuple(int(document) for document in self._order[places[0] : places[1] + 1])

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The windows of an epoch in the order in which they are trained, int64 [windows]."""
        key = [self.options.seed, self.options.stage, _WINDOWS_KEY, epoch]
        return np.random.default_rng(key).permutation(self._num_windows)

    def _cut(self, start: int) -> Iterator[Piece]:
        """Pieces of the window that begins with token ``start`` of all documents."""
        end = min(start + self.options.seq_len, int(self._ends[-1]))
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            piece = self._piece(place)
            begin = start - (int(self._ends[place]) - len(piece.input_ids))
            taken = slice(begin, begin + end - start)
            yield Piece(piece.input_ids[taken], piece.loss_mask[taken])
            start = int(self._ends[place])
            place += 1

    def _count_continuous(self, num_tokens: int) -> int:
        full, tail = divmod(num_tokens, self.options.seq_len)
        if tail >= self.options.min_tail_len:
            return full + 1
        self.counts[TAIL] = tail
        return full

    def _piece(self, place: int) -> Piece:
        return with_end(*self._documents.piece(int(self._order[place])), self.options.eos_id)
