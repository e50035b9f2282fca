"""Documents into windows of ``seq_len`` tokens, for causal language models: the arithmetic, for lists and for streams.

Every document ends with the end-of-text token, which is part of it: attended to, and a label wherever the token before
it is one. S tokens per window.

* ``continuous``: documents stand one behind the other and are cut every S tokens; only the last window may be shorter.
* ``document``: a window holds one document, or a part of it; the next part begins ``stride`` tokens later. What the
  window before held is context there, and no label a second time.

Nothing is left out without being counted. ``pack``, for drafters, never splits a document: see ``packing.py``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from helixctl.errors import UsageError

KEPT = "documents"
"""Count of documents whose tokens have all been handed out or counted as tail."""
TAIL = "tail_tokens"
"""Count of tokens in pieces shorter than ``min_tail_len``, which are left out."""
SHORT = "too_short"
"""Count of documents of fewer than ``min_tail_len`` tokens (``document`` packing), left out."""


@dataclass(frozen=True)
class WindowOptions:
    """How documents become batches.

    Raises:
        UsageError: values that make no sense together.
    """

    seq_len: int
    """Tokens per window."""
    rows: int
    """Windows per batch; a last batch with fewer is filled up with padding."""
    eos_id: int
    """Ends every document that does not end with it already."""
    packing: Literal["continuous", "document"] = "continuous"
    """Windows over all documents, or inside one."""
    stride: int | None = None
    """Tokens from one window of a document to the next (``document`` only); None is ``seq_len``: no overlap."""
    min_tail_len: int = 2
    """A short window with fewer new tokens is left out, and counted; one token alone has no label."""
    seed: int = 0
    """Decides every order, together with stage and epoch."""
    stage: int = 0
    """Place of the training stage: two stages over the same documents see them in different orders."""
    pad_id: int = 0
    """Fills the end of a short window; in no document, never a label."""

    def __post_init__(self) -> None:
        if self.packing == "continuous" and self.stride is not None:
            raise UsageError("stride has no meaning with continuous packing", fix="leave it out, or pack by document")
        if self.stride is not None and not 0 < self.stride <= self.seq_len:
            text = f"stride {self.stride} would leave tokens out between windows of {self.seq_len}"
            raise UsageError(text, fix=f"use 1 to {self.seq_len}")
        if min(self.seq_len, self.rows, self.min_tail_len) < 1 or self.min_tail_len > self.seq_len:
            fix = "use positive numbers, and a min_tail_len no larger than seq_len"
            raise UsageError(f"no windows with {self}", fix=fix)

    @property
    def step(self) -> int:
        """Tokens from one window to the next."""
        return self.stride or self.seq_len


@dataclass(frozen=True)
class Shard:
    """This process among those that train together."""

    rank: int = 0
    world_size: int = 1


ALONE = Shard()


class Piece(NamedTuple):
    """Part of one document, in one window."""

    input_ids: NDArray[np.integer]
    loss_mask: NDArray[np.bool_]


Window = Sequence[Piece]
"""What one row holds, in order; together at most S tokens."""


def with_end(ids: NDArray[np.integer], mask: NDArray[np.bool_], eos_id: int) -> Piece:
    """A document and its end. The end is a label iff the document's last token is one."""
    if ids.size == 0 or int(ids[-1]) == eos_id:
        return Piece(ids, mask)
    return Piece(np.append(ids, eos_id), np.append(mask, mask[-1]))


def count_windows(
    lengths: NDArray[np.integer], options: WindowOptions
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Windows of documents packed by ``document``, ends included in ``lengths`` [N].

    Returns:
        windows int64 [N]; tokens left out in tails int64 [N]; too short for any window bool [N].
    """
    lengths = np.asarray(lengths, np.int64)
    further = np.maximum(0, -(-(lengths - options.seq_len) // options.step))
    new = np.where(further > 0, lengths - options.seq_len - (further - 1) * options.step, lengths)  # in the last one
    full = new == np.where(further > 0, options.step, options.seq_len)
    left_out = (new < options.min_tail_len) & ~full
    windows = 1 + further - left_out
    short = windows == 0
    return windows, np.where(left_out & ~short, new, 0), short


def document_window(document: Piece, number: int, options: WindowOptions) -> Window:
    """Window ``number`` of a document; what the one before held is no label again."""
    start = number * options.step
    ids = document.input_ids[start : start + options.seq_len]
    mask = document.loss_mask[start : start + options.seq_len]
    if number and options.step < options.seq_len:
        mask = mask.copy()
        mask[: options.seq_len - options.step] = False
    return (Piece(ids, mask),)


# ------------------------------------------------------------------------------------------------------------ streams


@dataclass(frozen=True)
class Numbered:
    """A document of a stream: its place in the stream, and its tokens or why it has none."""

    number: int
    piece: Piece | None
    reason: str = ""
    """Why it was dropped, where ``piece`` is None."""


@dataclass
class Packed:
    """A window of a stream, and where the stream stands behind it."""

    window: Window | None
    """None at the end of the stream, where counts may be left."""
    document: int
    """The first document that is not handed out completely."""
    token: int
    """Its first token that is not (``document`` packing: where its next window begins)."""
    counts: Counter[str] = field(default_factory=Counter)
    """What became of documents since the window before."""


def pack_stream(documents: Iterable[Numbered], options: WindowOptions, token: int = 0) -> Iterator[Packed]:
    """Windows of a stream; ``token``: where to begin in its first document."""
    pack = _pack_continuous if options.packing == "continuous" else _pack_documents
    return pack(documents, options, token)


def _pack_documents(documents: Iterable[Numbered], options: WindowOptions, token: int) -> Iterator[Packed]:
    counts: Counter[str] = Counter()
    number = -1
    for document in documents:
        number = document.number
        if document.piece is None:
            counts[document.reason] += 1
            continue
        windows, tail, short = (int(x[0]) for x in count_windows(np.array([len(document.piece[0])]), options))
        counts += Counter({SHORT: short})
        for window in range(token // options.step, windows):
            last = window + 1 == windows
            counts += Counter({KEPT: int(last), TAIL: tail * last})
            after = (number + 1, 0) if last else (number, (window + 1) * options.step)
            yield Packed(document_window(document.piece, window, options), *after, counts)
            counts = Counter()
        token = 0
    yield Packed(None, number + 1, 0, counts)


def _pack_continuous(documents: Iterable[Numbered], options: WindowOptions, token: int) -> Iterator[Packed]:
    queue = _Queue(token)
    for document in documents:
        queue.add(document)
        while queue.length >= options.seq_len:
            yield queue.take(options.seq_len)
    if queue.length >= options.min_tail_len:
        yield queue.take(queue.length)
    yield queue.drop()


class _Queue:
    """Documents that are read and not handed out yet."""

    def __init__(self, token: int) -> None:
        self.length = 0
        self._waiting: deque[Numbered] = deque()
        self._token = token
        self._next = 0  # number behind the last document

    def add(self, document: Numbered) -> None:
        skipped = self._token if not self._waiting else 0
        self.length += len(document.piece[0]) - skipped if document.piece else 0
        self._waiting.append(document)
        self._next = document.number + 1

    def take(self, num_tokens: int) -> Packed:
        """The next window."""
        window: list[Piece] = []
        counts: Counter[str] = Counter()
        self.length -= num_tokens
        while self._waiting:
            front = self._waiting[0]
            if front.piece is None:
                counts[front.reason] += 1
            else:
                end = min(len(front.piece[0]), self._token + num_tokens)
                if end > self._token:
                    window.append(Piece(front.piece[0][self._token : end], front.piece[1][self._token : end]))
                num_tokens -= end - self._token
                self._token = end
                if end < len(front.piece[0]):
                    break
                counts[KEPT] += 1
            self._waiting.popleft()
            self._token = 0
        return Packed(tuple(window), *self._place(), counts)

    def drop(self) -> Packed:
        """Count what is left, at the end of the stream."""
        counts = Counter({TAIL: self.length}) if self.length else Counter()
        for document in self._waiting:
            counts[document.reason if document.piece is None else KEPT] += 1
        self._waiting.clear()
        return Packed(None, self._next, 0, counts)

    def _place(self) -> tuple[int, int]:
        return (self._waiting[0].number, self._token) if self._waiting else (self._next, 0)
