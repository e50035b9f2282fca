"""The windows of a prepared store, and what they come to, read from little more than its index. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from helixctl.data.store import MixLine, SplitName, Store
from helixctl.data.window_set import StoredDocuments, Windows
from helixctl.data.windows import WindowOptions
from helixctl.errors import DataError
from helixctl.recipe.causal_lm import LMDataOptions


@dataclass(frozen=True)
class WindowCounts:
    """A store in numbers."""

    train_documents: int
    validation_documents: int
    train_windows: int
    """Of one epoch."""
    validation_windows: int
    tokens_per_window: float
    """Real training tokens in a window, the ends of documents included, on average."""
    supervised_share: float
    """Share of the training tokens that are learnt."""
    left_out: dict[str, int]
    """Training tokens and documents in no window, by reason."""
    tokenizer_length: int
    fingerprint: str
    mix: tuple[MixLine, ...]
    """What an epoch is made of, by source."""


@dataclass(frozen=True)
class WindowSource:
    """What decides the windows of one training stage."""

    data: LMDataOptions
    rows: int
    """Windows per micro-batch."""
    seed: int
    stage: int


def make_windows(source: WindowSource, split: SplitName) -> Windows | None:
    """The windows of one split of the prepared store; None where its documents fill none.

    Raises:
        DataError: no store, a torn one, or a tokenizer without a token that ends texts.
    """
    store = Store.open(source.data.store)
    if store.split(split).num_documents == 0:
        return None
    try:
        return Windows(StoredDocuments(source.data.store, split), _options(source, store), shuffle=split == "train")
    except DataError:  # raised for one reason: no window
        return None


def count_windows_of_store(source: WindowSource) -> WindowCounts:
    """Numbers of a prepared store.

    Raises:
        DataError: see ``make_windows``.
    """
    store = Store.open(source.data.store)
    train, validation = make_windows(source, "train"), make_windows(source, "validation")
    split = store.split("train")
    return WindowCounts(
        train_documents=split.num_documents,
        validation_documents=store.split("validation").num_documents,
        train_windows=0 if train is None else len(train),
        validation_windows=0 if validation is None else len(validation),
        tokens_per_window=0.0 if train is None else train.num_tokens / len(train),
        supervised_share=split.num_supervised / max(1, split.num_tokens),
        left_out={} if train is None else {name: count for name, count in train.counts.items() if count},
        tokenizer_length=store.manifest.tokenizer.vocab_size,
        fingerprint=store.fingerprint,
        mix=store.manifest.mix,
    )


def _options(source: WindowSource, store: Store) -> WindowOptions:
    tokenizer, data = store.manifest.tokenizer, source.data
    if tokenizer.eos_token_id is None:
        text = f"the tokenizer of {store.path} has no token that ends a text"
        raise DataError(text, fix="prepare with another tokenizer")
    return WindowOptions(
        seq_len=data.seq_len,
        rows=source.rows,
        eos_id=tokenizer.eos_token_id,
        packing=data.packing,
        stride=data.stride,
        min_tail_len=data.min_tail_len,
        seed=source.seed,
        stage=source.stage,
        pad_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )


def is_prepared(store: Path) -> bool:
    """Whether anything stands where the store should be."""
    return store.exists()
