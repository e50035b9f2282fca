"""What a prepared store comes to in rows, without reading more than its index. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from helixctl.data.packing import NO_CURRICULUM, Row, RowStream, pack
from helixctl.data.store import MixLine, Split, Store, is_store
from helixctl.recipe.schema import CurriculumOptions

_LOOKED_AT = 2000


@dataclass(frozen=True)
class CountOptions:
    """What of the recipe decides the rows of a store."""

    seed: int
    seq_len: int
    packing: bool
    epochs: int
    num_anchors: int
    block_size: int
    mask_token_id: int
    curriculum: CurriculumOptions = NO_CURRICULUM
    anchors_per_document: int | None = None


@dataclass(frozen=True)
class DataCounts:
    """A store in numbers; documents without an eligible anchor before `seq_len` count nowhere but in `left_out`."""

    train_documents: int
    validation_documents: int
    train_rows: int
    """Rows of all epochs together."""
    validation_rows: int
    train_tokens: int
    """Of the training documents, each cut at ``seq_len``."""
    validation_tokens: int
    """Of the held-out documents, cut alike."""
    tokens_per_row: float
    """Real tokens in a row of the first epoch, on average."""
    supervised_share: float
    """Supervised tokens over all tokens."""
    anchor_coverage: float
    """Expected share of the supervised tokens that a row's anchors put into a block."""
    most_anchors: int
    """Anchors that the fullest row of the first epoch can use."""
    left_out: int
    truncated: int
    """Training documents longer than a row."""
    tokenizer_length: int
    mask_token_seen: bool
    """The mask token stands in one of the first documents, so it is no mask token."""
    mix: tuple[MixLine, ...]
    """What an epoch is made of, by source."""

    def seen_tokens(self, num_loops: int, train_rows: int, validation_rows: int, validations: int) -> int:
        """Tokens of the documents that one of ``num_loops`` target loops sees in a whole run, each document once.

        Loops take whichever row is next, so a document comes to each with the same chance in every pass.

        Args:
            num_loops: target loops of all processes.
            train_rows: rows that the run trains on.
            validation_rows: rows of one validation pass, the same ones every time.
            validations: validation passes.
        """
        passes = train_rows * self.tokens_per_row / max(1, self.train_tokens)
        held_out = min(1.0, validation_rows / max(1, self.validation_rows)) * self.validation_tokens
        seen = self.train_tokens * _seen_share(passes, num_loops)
        return round(seen + held_out * _seen_share(validations, num_loops))


def _seen_share(passes: float, num_loops: int) -> float:
    """Of the documents, after whole passes over all of them and a part of one more."""
    whole, part = divmod(passes, 1)
    unseen: float = (1 - 1 / num_loops) ** whole * (1 - part / num_loops)
    return 1 - unseen


def count_data(path: Path, options: CountOptions) -> DataCounts | None:
    """Numbers of the store in `path`; None where there is none yet.

    Raises:
        DataError: there is a store, but it is torn or of another version.
    """
    if not is_store(path):
        return None
    store = Store.open(path)
    train, validation = store.split("train"), store.split("validation")
    documents = train.trainable(options.seq_len)
    lengths = np.minimum(train.lengths[documents], options.seq_len)
    supervised = train.supervised_counts[documents].astype(np.int64)
    for i in np.flatnonzero(train.lengths[documents] > options.seq_len):
        supervised[i] = int(train.loss_mask(int(documents[i]))[: options.seq_len].sum())
    rows: list[Row] = []
    train_rows = 0
    if documents.size:
        stream = RowStream(
            lengths, options.seq_len, seed=options.seed, packing=options.packing, curriculum=options.curriculum
        )
        train_rows = stream.first_row(options.epochs)
        rows = [row.documents for row in stream.rows(0, stream.first_row(1))]
    held_out = validation.trainable(options.seq_len)
    held_out_rows = pack(validation.lengths[held_out], options.seq_len, np.arange(held_out.size), options.packing)
    num_tokens = int(lengths.sum())
    held_out_tokens = int(np.minimum(validation.lengths[held_out], options.seq_len).sum())
    return DataCounts(
        train_documents=int(documents.size),
        validation_documents=int(held_out.size),
        train_rows=train_rows,
        validation_rows=len(held_out_rows),
        train_tokens=num_tokens,
        validation_tokens=held_out_tokens,
        tokens_per_row=num_tokens / max(1, len(rows)),
        supervised_share=float(supervised.sum()) / max(1, num_tokens),
        anchor_coverage=_anchor_coverage(eligible := [supervised[list(row)] for row in rows], options),
        most_anchors=max((_usable_anchors(row, options) for row in eligible), default=0),
        left_out=train.num_documents - int(documents.size),
        truncated=train.num_truncated(options.seq_len),
        tokenizer_length=store.manifest.tokenizer.vocab_size,
        mask_token_seen=_contains(train, options.mask_token_id),
        mix=store.manifest.mix,
    )


def _anchor_coverage(rows: Sequence[NDArray[np.int64]], options: CountOptions) -> float:
    """A token is missed when none of the `block_size - 1` positions before it is drawn.

    With A anchors over E eligible positions each is drawn with probability A / E; E is close to the supervised tokens,
    which `rows` holds by document.
    """
    missed = total = 0.0
    for eligible in rows:
        allowed = _allowed_anchors(eligible, options)
        drawn = allowed / np.maximum(eligible, 1) * min(1.0, options.num_anchors / max(1, int(allowed.sum())))
        missed += float(((1.0 - drawn) ** (options.block_size - 1) * eligible).sum())
        total += float(eligible.sum())
    return 1.0 - missed / total if total else 0.0


def _allowed_anchors(eligible: NDArray[np.int64], options: CountOptions) -> NDArray[np.int64]:
    return eligible if options.anchors_per_document is None else eligible.clip(max=options.anchors_per_document)


def _usable_anchors(eligible: NDArray[np.int64], options: CountOptions) -> int:
    return min(options.num_anchors, int(_allowed_anchors(eligible, options).sum()))


def _contains(split: Split, token: int) -> bool:
    return any(bool((split.tokens(i) == token).any()) for i in range(min(_LOOKED_AT, split.num_documents)))
