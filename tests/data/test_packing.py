"""Packing: every document once, rows that fit and are full, one stream whatever is asked first."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.data.packing import RowStream, epoch_order, length_order, pack
from helixctl.recipe.schema import CurriculumOptions

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=200)


@given(LENGTHS, st.integers(1, 30), st.booleans(), st.integers(0, 3))
def test_every_document_once_and_every_row_fits(lengths: list[int], seq_len: int, packing: bool, seed: int) -> None:
    order = epoch_order(seed, 0, len(lengths))
    rows = pack(lengths, seq_len, order, packing)
    assert sorted(d for row in rows for d in row) == list(range(len(lengths)))
    assert all(sum(min(lengths[d], seq_len) for d in row) <= seq_len for row in rows)
    if not packing:
        assert rows == [(int(d),) for d in order]


def test_rows_of_mixed_documents_are_nearly_full() -> None:
    lengths = np.random.default_rng(0).integers(20, 600, 5000)
    rows = pack(lengths, 2048, epoch_order(0, 0, 5000), True)
    assert lengths.sum() / (len(rows) * 2048) > 0.98


def test_orders_differ_between_epochs_and_seeds_and_repeat_exactly() -> None:
    orders = [epoch_order(seed, epoch, 100).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(o) for o in orders}) == 4
    assert epoch_order(1, 1, 100).tolist() == orders[-1]


@given(LENGTHS, st.data())
def test_any_window_of_the_stream_equals_the_epochs_written_out(lengths: list[int], data: st.DataObject) -> None:
    seq_len, epochs = 20, 4
    written = [
        (epoch, place, row)
        for epoch in range(epochs)
        for place, row in enumerate(pack(lengths, seq_len, epoch_order(7, epoch, len(lengths)), True))
    ]
    stream = RowStream(np.array(lengths), seq_len, seed=7, packing=True)
    for _ in range(3):
        start = data.draw(st.integers(0, len(written)))
        stop = data.draw(st.integers(start, len(written)))
        assert [tuple(row) for row in stream.rows(start, stop)] == written[start:stop]
    assert stream.first_row(epochs) == len(written)


def test_threads_that_share_a_stream_see_the_same_rows() -> None:
    stream = RowStream(np.arange(1, 60), 64, seed=0, packing=True)
    seen: dict[int, list[object]] = {}

    def read(worker: int) -> None:
        seen[worker] = [stream.rows(i, i + 3) for i in range(0, 300, 3)]

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one document"):
        RowStream(np.zeros(0, np.int32), 8, seed=0, packing=True)


@given(LENGTHS, st.floats(0, 1), st.integers(0, 5))
def test_a_curriculum_keeps_every_document_and_moves_none_too_far(lengths: list[int], spread: float, seed: int) -> None:
    order = epoch_order(seed, 0, len(lengths))
    found = length_order(np.array(lengths), order, spread, np.random.default_rng(seed))
    assert sorted(found) == list(range(len(lengths)))
    assert found.tolist() == length_order(np.array(lengths), order, spread, np.random.default_rng(seed)).tolist()
    by_length = np.sort(lengths)
    lowest, highest = np.searchsorted(by_length, lengths), np.searchsorted(by_length, lengths, side="right") - 1
    for before, after in itertools.pairwise(found):
        assert (lowest[before] - highest[after]) / len(lengths) <= spread
    if spread == 0:
        assert [lengths[d] for d in found] == by_length.tolist()


def test_a_curriculum_ends_after_its_epochs_and_is_a_function_of_seed_and_epoch() -> None:
    lengths = np.random.default_rng(0).integers(5, 200, 400)
    options = CurriculumOptions(epochs=2, spread=0.1)
    streams = [RowStream(lengths, 256, seed=3, packing=False, curriculum=options) for _ in range(2)]
    plain = RowStream(lengths, 256, seed=3, packing=False)
    assert streams[0].rows(900, 1000) == streams[1].rows(0, 1600)[900:1000], "whatever was asked for before"
    for epoch in range(4):
        rows = [row.documents for row in streams[0].rows(400 * epoch, 400 * (epoch + 1))]
        own = [int(lengths[document]) for row in rows for document in row]
        assert (np.corrcoef(own, np.arange(400))[0, 1] > 0.9) == (epoch < 2)
        assert (rows == [row.documents for row in plain.rows(400 * epoch, 400 * (epoch + 1))]) == (epoch >= 2)
    assert streams[0].rows(0, 400) != streams[0].rows(400, 800)


def test_rows_of_a_curriculum_are_nearly_as_full() -> None:
    lengths = np.random.default_rng(0).integers(20, 600, 5000)
    options = CurriculumOptions(epochs=1)
    stream = RowStream(lengths, 2048, seed=0, packing=True, curriculum=options)
    assert lengths.sum() / (stream.first_row(1) * 2048) > 0.9, "documents of one row are of like length"
