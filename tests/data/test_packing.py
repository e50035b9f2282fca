"""Packing: every document once, rows that fit and are full, one stream whatever is asked first."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.data.packing import RowStream, epoch_order, pack

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
