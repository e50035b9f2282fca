"""Small stores for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from helixctl.data.store import SourceCounts, Store, TokenizerInfo
from helixctl.data.store_writer import StoreWriter

INFO = TokenizerInfo("a" * 64, "b" * 64, 100, 2, 0)


def write_store(
    path: Path,
    train: Sequence[int],
    validation: Sequence[int] = (),
    vocab_size: int = 100,
    info: TokenizerInfo | None = None,
    *,
    copies: int = 1,
) -> Store:
    """A store whose documents have the given lengths; the second half of each is supervised.

    ``copies`` repeats the training documents.
    """
    info = info or TokenizerInfo("a" * 64, "b" * 64, vocab_size, 2, 0)
    rng = np.random.default_rng(0)
    with StoreWriter(path, info) as writer:
        for length in train:
            writer.add("train", rng.integers(3, vocab_size, length), np.arange(length) >= length // 2, copies=copies)
        for length in validation:
            writer.add("validation", rng.integers(3, vocab_size, length), np.arange(length) >= length // 2)
        num_documents = len(train) + len(validation)
        source = SourceCounts("memory", "tokens", 1.0, "train", "c" * 64, 1, num_documents, num_documents)
        writer.finish([source], mask_policy="all_turns", validation_fraction=0.0)
    return Store.open(path)
