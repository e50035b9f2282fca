"""A store in numbers agrees with the loader that will read it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helixctl.data.count import CountOptions, count_data
from helixctl.data.loader import BatchLoader, LoaderOptions
from helixctl.data.sequence import Sequence
from helixctl.data.store import Store
from helixctl.errors import DataError
from tests.data.builders import write_store

OPTIONS = CountOptions(seed=3, seq_len=32, packing=True, epochs=3, num_anchors=4, block_size=3, mask_token_id=101)
SEQUENCE = Sequence(batches_per_step=1, total_steps=400, validate_every_steps=200, validation_batches=1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    lengths = np.random.default_rng(1).integers(2, 90, 40).tolist()
    return write_store(tmp_path_factory.mktemp("count") / "s", lengths, [9, 12, 30, 17, 4, 40])


def loader(store: Store, most: int | None = None, num_anchors: int = 4) -> BatchLoader:
    options = LoaderOptions(seed=3, seq_len=32, rows=1, num_anchors=num_anchors, anchors_per_document=most)
    return BatchLoader(store.split("train"), store.split("validation"), SEQUENCE, options)


def test_rows_are_the_loaders(store):
    counts, reader = count_data(store.path, OPTIONS), loader(store)
    assert counts is not None
    assert counts.train_rows == reader.first_row(3)
    assert counts.validation_rows == reader.num_validation_rows
    assert counts.left_out == reader.num_left_out
    assert counts.train_documents + counts.left_out == store.split("train").num_documents
    assert counts.truncated == int((store.split("train").lengths > 32).sum())


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("num_anchors", [4, 99])
def test_most_anchors_are_those_of_the_fullest_row(store, most, num_anchors):
    options = replace(OPTIONS, num_anchors=num_anchors, anchors_per_document=most)
    counts, reader = count_data(store.path, options), loader(store, most, num_anchors)
    assert counts is not None
    used = [int(reader.batch(seq).anchor_valid.sum()) for seq in range(reader.first_row(1))]
    assert max(used) <= counts.most_anchors <= max(used) + 2  # the last supervised token of a document starts nothing


@pytest.mark.parametrize("most", [None, 1])
def test_shares_are_those_of_real_batches(store, most):
    counts, reader = count_data(store.path, replace(OPTIONS, anchors_per_document=most)), loader(store, most)
    assert counts is not None
    tokens = supervised = covered = rows = 0
    for seq in range(SEQUENCE.total):
        batch = reader.batch(seq)
        if batch.role == "validation":
            continue
        rows += 1
        tokens += batch.num_tokens
        supervised += int(batch.loss_mask.sum())
        hit = np.zeros(32, bool)
        for anchor in batch.anchors[0][batch.anchor_valid[0]].tolist():
            end = next(end for start, end in batch.spans[0] if start <= anchor < end)
            hit[anchor + 1 : min(anchor + 3, end)] = True
        covered += int((hit & batch.loss_mask[0].numpy()).sum())
    assert counts.tokens_per_row == pytest.approx(tokens / rows, rel=0.02)
    assert counts.supervised_share == pytest.approx(supervised / tokens, rel=0.1)
    assert counts.anchor_coverage == pytest.approx(covered / supervised, abs=0.1)


@pytest.mark.parametrize(("num_loops", "num_rows"), [(1, 5), (1, 100), (3, 20), (3, 100)])
def test_tokens_seen_are_those_that_loops_would_keep(store, num_loops, num_rows):
    """Rows dealt to loops at random, each keeping every document once: the mean over loops and 20 draws."""
    counts, reader = count_data(store.path, OPTIONS), loader(store)
    assert counts is not None
    sequence = Sequence(1, num_rows, num_rows // 2, reader.num_validation_rows)
    batches = BatchLoader(store.split("train"), store.split("validation"), sequence, reader.options)
    documents = [
        [(batch.role, number, end - start) for number, (start, end) in zip(numbers, spans, strict=True)]
        for batch in map(batches.batch, range(sequence.total))
        for numbers, spans in zip(batch.documents, batch.spans, strict=True)
    ]
    draws, kept = np.random.default_rng(0), 0
    for _ in range(20):
        loops = draws.integers(num_loops, size=len(documents)).tolist()
        known = {(loop, *document) for loop, row in zip(loops, documents, strict=True) for document in row}
        kept += sum(length for *_, length in known)
    told = counts.seen_tokens(num_loops, num_rows, reader.num_validation_rows, 2)
    assert told == pytest.approx(kept / 20 / num_loops, rel=0.05)


def test_a_mask_token_in_the_text_is_noticed(store):
    token = int(store.split("train").tokens(0)[0])
    for mask_token, seen in ((token, True), (101, False)):
        counts = count_data(store.path, replace(OPTIONS, mask_token_id=mask_token))
        assert counts is not None and counts.mask_token_seen is seen


def test_no_store_is_no_error_but_a_torn_one_is(tmp_path):
    assert count_data(tmp_path / "none", OPTIONS) is None
    assert count_data(tmp_path, OPTIONS) is None
    torn = write_store(tmp_path / "s", [5, 6], [4])
    (torn.path / "train" / "tokens.bin").unlink()
    with pytest.raises(DataError, match="torn"):
        count_data(torn.path, OPTIONS)
