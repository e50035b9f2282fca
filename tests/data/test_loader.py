"""The loader: a batch depends on (seed, number) only, and an epoch holds every document once."""

from __future__ import annotations

import logging
import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helixctl.data.anchors import eligible_anchors
from helixctl.data.batch import MicroBatch
from helixctl.data.loader import BatchLoader, LoaderOptions
from helixctl.data.sequence import Sequence
from helixctl.data.store import Store
from helixctl.errors import DataError
from tests.data.builders import write_store

OPTIONS = LoaderOptions(seed=3, seq_len=32, rows=2, num_anchors=6, pad_id=99)
SEQUENCE = Sequence(batches_per_step=2, total_steps=40, validate_every_steps=5, validation_batches=2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lengths = np.random.default_rng(1).integers(2, 90, 40).tolist()
    return write_store(tmp_path_factory.mktemp("data") / "s", lengths, [9, 12, 30, 17, 4, 40])


def loader(store: Store, options: LoaderOptions = OPTIONS, sequence: Sequence = SEQUENCE) -> BatchLoader:
    return BatchLoader(store.split("train"), store.split("validation"), sequence, options)


def same(first: MicroBatch, second: MicroBatch) -> bool:
    pairs = [(getattr(first, f.name), getattr(second, f.name)) for f in fields(MicroBatch)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_batches_hold_the_documents_they_name(store: Store) -> None:
    batches = loader(store)
    for seq in range(SEQUENCE.total):
        batch = batches.batch(seq)
        split = store.split(batch.role)
        assert batch.seq == seq and (batch.role, batch.index) == SEQUENCE.entry(seq)
        assert batch.input_ids.dtype == batch.position_ids.dtype == batch.anchors.dtype == torch.int64
        assert batch.document_ids.dtype == torch.int32 and batch.loss_mask.dtype == torch.bool
        for row in range(OPTIONS.rows):
            end = 0
            for number, document in enumerate(batch.documents[row]):
                start, end = batch.spans[row][number]
                length = min(int(split.lengths[document]), OPTIONS.seq_len)
                assert end - start == length
                assert batch.input_ids[row, start:end].tolist() == split.tokens(document)[:length].tolist()
                assert batch.loss_mask[row, start:end].tolist() == split.loss_mask(document)[:length].tolist()
                assert batch.position_ids[row, start:end].tolist() == list(range(length))
                assert set(batch.document_ids[row, start:end].tolist()) == {number}
            assert set(batch.input_ids[row, end:].tolist()) <= {99}
            assert set(batch.document_ids[row, end:].tolist()) <= {-1}
            assert not batch.loss_mask[row, end:].any()
        assert batch.num_tokens == int((batch.document_ids >= 0).sum())


def test_anchors_are_eligible_sorted_and_distinct(store: Store) -> None:
    batches = loader(store)
    for seq in range(SEQUENCE.total):
        batch = batches.batch(seq)
        assert batch.anchors.shape == batch.anchor_valid.shape == (OPTIONS.rows, OPTIONS.num_anchors)
        for row in range(OPTIONS.rows):
            eligible = np.flatnonzero(eligible_anchors(batch.loss_mask[row].numpy(), batch.document_ids[row].numpy()))
            drawn = batch.anchors[row][batch.anchor_valid[row]].tolist()
            assert drawn == sorted(set(drawn)) and set(drawn) <= set(eligible.tolist())
            assert len(drawn) == min(OPTIONS.num_anchors, eligible.size) > 0


@pytest.mark.parametrize("packing", [True, False])
def test_every_epoch_holds_every_trainable_document_once(store: Store, packing: bool) -> None:
    options = replace(OPTIONS, rows=1, packing=packing)
    batches = loader(store, options, Sequence(1, 200))
    expected = store.split("train").trainable(OPTIONS.seq_len).tolist()
    assert batches.num_left_out == 40 - len(expected) > 0
    for epoch in range(3):
        rows = [batches.batch(i) for i in range(batches.first_row(epoch), batches.first_row(epoch + 1))]
        assert sorted(d for batch in rows for d in batch.documents[0]) == expected
        assert {batch.epoch for batch in rows} == {epoch}
        if not packing:
            assert all(len(batch.documents[0]) == 1 for batch in rows)


@given(st.lists(st.integers(0, SEQUENCE.total - 1), min_size=1, max_size=8))
def test_neither_the_order_of_calls_nor_the_loader_object_matters(store: Store, seqs: list[int]) -> None:
    used = loader(store)
    for seq in seqs:
        assert same(used.batch(seq), loader(store).batch(seq))


def test_threads_that_share_a_loader_get_the_same_batches(store: Store) -> None:
    shared, alone = loader(store), loader(store)
    seen: list[list[MicroBatch]] = [[], [], []]
    orders = [range(SEQUENCE.total), range(SEQUENCE.total - 1, -1, -1), range(SEQUENCE.total)]

    def read(worker: int) -> None:
        seen[worker].extend(shared.batch(seq) for seq in orders[worker])

    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for batches in seen:
        assert all(same(batch, alone.batch(batch.seq)) for batch in batches)
        assert len(batches) == SEQUENCE.total


def test_seeds_and_epochs_change_rows_and_anchors(store: Store) -> None:
    first, other = loader(store).batch(0), loader(store, replace(OPTIONS, seed=4)).batch(0)
    assert first.documents != other.documents
    batches = loader(store, replace(OPTIONS, rows=1, packing=False), Sequence(1, 200))
    found: dict[int, set[tuple[int, ...]]] = {}
    for seq in range(200):
        batch = batches.batch(seq)
        found.setdefault(batch.documents[0][0], set()).add(tuple(batch.anchors[0].tolist()))
    assert max(len(anchors) for anchors in found.values()) > 1


def test_every_validation_pass_is_the_same(store: Store) -> None:
    batches = loader(store)
    passes: dict[int, list[MicroBatch]] = {}
    for seq in range(SEQUENCE.total):
        if SEQUENCE.entry(seq).role == "validation":
            passes.setdefault(SEQUENCE.step_of(seq), []).append(replace(batches.batch(seq), seq=0))
    first, *others = passes.values()
    assert others and all(same(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert [d for batch in first for row in batch.documents for d in row][:2] == [0, 1]


def test_a_pass_that_wants_more_rows_than_there_are_begins_again_and_says_so(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    sequence = Sequence(1, 1, 1, 4)
    with caplog.at_level(logging.WARNING):
        batches = loader(store, sequence=sequence)
    count = batches.num_validation_rows
    assert f"asks for 8 rows, the held-out documents fill {count}" in caplog.text
    rows = [row for seq in range(1, 5) for row in batches.batch(seq).documents]
    assert rows == [rows[i % count] for i in range(8)]


def test_nothing_to_train_on_is_an_error_before_the_run(store: Store, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="within its first 1 tokens"):
        loader(store, replace(OPTIONS, seq_len=1))
    bare = write_store(tmp_path / "s", [9])
    with pytest.raises(DataError, match="give the recipe validation documents"):
        loader(bare)
    with pytest.raises(DataError, match="no held-out documents"):
        BatchLoader(bare.split("train"), None, SEQUENCE, OPTIONS)
    assert loader(bare, sequence=Sequence(1, 4)).batch(3).epoch == 6


def test_a_limit_per_document_holds_in_training_and_leaves_validation_alone(store: Store) -> None:
    plain, limited = loader(store), loader(store, replace(OPTIONS, anchors_per_document=1))
    fewer = 0
    for seq in range(SEQUENCE.total):
        before, after = plain.batch(seq), limited.batch(seq)
        if before.role == "validation":
            assert torch.equal(before.anchors, after.anchors)
            continue
        fewer += int(before.anchor_valid.sum() - after.anchor_valid.sum())
        for anchors, valid, spans in zip(after.anchors, after.anchor_valid, after.spans, strict=True):
            drawn = anchors[valid].tolist()
            assert all(sum(start <= a < end for a in drawn) <= 1 for start, end in spans)
    assert fewer > 0
