"""Micro-batches of windows: every window once an epoch, every held-out token once a pass, a function of the number."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from helixctl.data.lm_loader import StageWindows, WindowLoader
from helixctl.data.sequence import Sequence
from helixctl.data.window_set import ListedDocuments, Windows
from helixctl.data.windows import WindowOptions
from helixctl.errors import DataError

EOS = 1


def windows(num_documents: int, rows: int, stage: int = 0, first_id: int = 10, *, shuffle: bool = True) -> Windows:
    """Documents of 3 tokens and their end, one per window; their ids tell which."""
    ids = [[first_id + i] * 3 for i in range(num_documents)]
    return Windows(ListedDocuments(ids), WindowOptions(4, rows, EOS, seed=5, stage=stage), shuffle=shuffle)


def loader(rows: int = 2, steps: tuple[int, ...] = (5, 5), every: int = 2, held_out: int = 3) -> WindowLoader:
    stages, first = [], 0
    for stage, num_steps in enumerate(steps):
        train = windows(4, rows, stage, 100 * (stage + 1))
        validation = windows(held_out, rows, stage, 50, shuffle=False) if held_out else None
        stages.append(StageWindows(first, train, validation))
        first += num_steps
    return WindowLoader(stages, Sequence(3, sum(steps), every, 2), rows)


def first_ids(loader: WindowLoader, seq: int) -> list[int]:
    return [int(i) for i in loader.batch(seq).input_ids[:, 0] if i != 0]


def test_every_epoch_of_a_stage_has_every_window_once_in_an_order_of_its_own() -> None:
    made = loader()
    sequence = Sequence(3, 10, 2, 2)
    rows: dict[int, list[int]] = {0: [], 1: []}
    for seq in range(sequence.total):
        if sequence.entry(seq).role == "train":
            rows[int(sequence.step_of(seq) >= 5)] += first_ids(made, seq)
    for stage, ids in rows.items():
        assert len(ids) == 5 * 3 * 2
        epochs = [ids[i : i + 4] for i in range(0, 28, 4)]
        assert all(sorted(epoch) == [100 * (stage + 1) + i for i in range(4)] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [i - 100 for i in rows[0]] != [i - 200 for i in rows[1]], "stages see the same documents in other orders"


@given(rows=st.integers(1, 4), held_out=st.integers(1, 9))
def test_a_validation_pass_holds_every_window_once_or_as_many_as_it_has_rows(rows: int, held_out: int) -> None:
    made, sequence = loader(rows, held_out=held_out), Sequence(3, 10, 2, 2)
    start = sequence.seq_after_step(1)
    seen = [i for seq in (start, start + 1) for i in first_ids(made, seq)]
    assert seen == [50 + i for i in range(min(held_out, 2 * rows))]


def test_empty_rows_are_padding_without_documents() -> None:
    made, sequence = loader(), Sequence(3, 10, 2, 2)
    batch = made.batch(sequence.seq_after_step(1) + 1)
    assert len(batch.spans) == len(batch.documents) == 1 and batch.num_tokens == 4
    assert batch.document_ids.tolist() == [[0] * 4, [-1] * 4]
    assert not batch.loss_mask[1].any()


def test_a_batch_is_a_function_of_its_number() -> None:
    one, other = loader(), loader()
    for seq in (17, 3, 9, 3):
        for name in ("input_ids", "position_ids", "document_ids", "loss_mask"):
            assert torch.equal(getattr(one.batch(seq), name), getattr(other.batch(seq), name))


def test_spans_and_documents_tell_what_stands_where() -> None:
    options = WindowOptions(5, 1, EOS, seed=1)
    packed = Windows(ListedDocuments([[7] * n for n in (2, 1, 6, 3)]), options, shuffle=True)
    made = WindowLoader([StageWindows(0, packed, None)], Sequence(1, 8), 1)
    for seq in range(4):
        batch = made.batch(seq)
        (spans,), (documents,) = batch.spans, batch.documents
        lengths = Counter(batch.document_ids[0][batch.document_ids[0] >= 0].tolist())
        assert [end - start for start, end in spans] == [lengths[i] for i in range(len(lengths))]
        assert len(documents) == len(spans) and spans[-1][1] == batch.num_tokens
        starts = np.flatnonzero(batch.position_ids[0] == 0)[: len(spans)]
        assert [start for start, _ in spans] == starts.tolist()


def test_validation_without_held_out_documents_is_refused() -> None:
    with pytest.raises(DataError, match="no held-out documents"):
        loader(held_out=0)
