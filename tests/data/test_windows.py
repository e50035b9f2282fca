"""Windows: each token exactly once, or counted as left out; streams that stop and go on anywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from helixctl.data.document_set import WindowDataset
from helixctl.data.token_batch import make_token_batch
from helixctl.data.window_set import ListedDocuments, Windows
from helixctl.data.windows import KEPT, SHORT, TAIL, Numbered, Packed, Piece, WindowOptions, pack_stream, with_end
from helixctl.errors import UsageError

EOS = 99
LENGTHS = st.lists(st.integers(0, 23), max_size=8)
OPTIONS = st.builds(
    lambda seq_len, stride, tail, packing: WindowOptions(
        seq_len, 2, EOS, packing, min(stride, seq_len) if packing == "document" else None, min(tail, seq_len)
    ),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(["continuous", "document"]),
)


def documents(lengths: list[int]) -> list[list[int]]:
    """Ids that tell document and place: 1000 * document + place."""
    return [[1000 * (i + 1) + k for k in range(length)] for i, length in enumerate(lengths)]


def numbered(lengths: list[int], first: int = 0) -> list[Numbered]:
    """As a stream has them; empty documents were dropped on the way."""
    made = []
    for number, ids in enumerate(documents(lengths)):
        piece = with_end(np.array(ids), np.ones(len(ids), np.bool_), EOS) if ids else None
        made.append(Numbered(number, piece, "empty"))
    return made[first:]


def supervised(packed: list[Packed]) -> list[int]:
    pieces = [piece for one in packed if one.window is not None for piece in one.window]
    return [int(token) for piece in pieces for token in piece.input_ids[piece.loss_mask]]


def reference(lengths: list[int], options: WindowOptions) -> tuple[list[list[int]], Counter[str]]:
    """Slow and obvious: new tokens of every window, and what is left out."""
    counts: Counter[str] = Counter()
    ended = [[*ids, EOS] for ids in documents(lengths) if ids]
    counts["empty"] = len(lengths) - len(ended)
    windows = []
    streams = [list(chain(*ended))] if options.packing == "continuous" else ended
    for stream in streams:
        seen = 0
        cut: list[list[int]] = []
        while seen < len(stream):
            size = options.seq_len if seen == 0 or options.packing == "continuous" else options.step
            new = stream[seen : seen + size]
            seen += size
            if len(new) >= options.min_tail_len or len(new) == size:
                cut.append(new)
            elif options.packing == "document" and not cut:
                counts[SHORT] += 1
                counts[KEPT] -= 1
            else:
                counts[TAIL] += len(new)
        windows += cut
    counts[KEPT] += len(ended)
    return windows, +counts


@given(lengths=LENGTHS, options=OPTIONS)
def test_every_token_is_learnt_once_or_counted(lengths: list[int], options: WindowOptions) -> None:
    windows, counts = reference(lengths, options)
    packed = list(pack_stream(numbered(lengths), options))
    assert [supervised([one]) for one in packed if one.window is not None] == windows
    assert sum((one.counts for one in packed), Counter()) == counts
    for one in packed:
        assert one.window is None or 0 < sum(len(piece.input_ids) for piece in one.window) <= options.seq_len


@given(lengths=LENGTHS, options=OPTIONS)
def test_list_and_stream_make_the_same_windows(lengths: list[int], options: WindowOptions) -> None:
    windows, counts = reference(lengths, options)
    if not windows:
        return
    dataset = Windows(ListedDocuments(documents(lengths)), options, shuffle=False)
    packed = [one.window for one in pack_stream(numbered(lengths), options) if one.window is not None]
    assert len(dataset) == len(packed)
    for number, window in enumerate(packed):
        for piece, expected in zip(dataset.window(number), window, strict=True):
            np.testing.assert_array_equal(piece.input_ids, expected.input_ids)
            np.testing.assert_array_equal(piece.loss_mask, expected.loss_mask)
    assert dataset.counts[TAIL] == counts[TAIL]
    assert dataset.counts[SHORT] == counts[SHORT] + counts["empty"]


@given(lengths=LENGTHS, options=OPTIONS, data=st.data())
def test_stream_goes_on_at_the_exact_token(lengths: list[int], options: WindowOptions, data: Any) -> None:
    packed = list(pack_stream(numbered(lengths), options))
    stop = data.draw(st.integers(0, len(packed)))
    done = packed[:stop]
    document, token = (done[-1].document, done[-1].token) if done else (0, 0)
    rest = list(pack_stream(numbered(lengths, document), options, token))
    assert supervised(done) + supervised(rest) == supervised(packed)
    assert sum((one.counts for one in done + rest), Counter()) == sum((one.counts for one in packed), Counter())


@given(lengths=LENGTHS, options=OPTIONS, seed=st.integers(0, 9))
def test_a_window_names_the_documents_it_holds(lengths: list[int], options: WindowOptions, seed: int) -> None:
    if not reference(lengths, options)[0]:
        return
    windows = Windows(ListedDocuments(documents(lengths)), replace(options, seed=seed), shuffle=True)
    for number in range(len(windows)):
        held = [[int(i) for i in piece.input_ids if i != EOS] for piece in windows.window(number)]
        named = windows.documents(number)
        assert len(held) == len(named)
        for ids, document in zip(held, named, strict=True):
            assert {i // 1000 - 1 for i in ids} <= {document}


def test_every_epoch_has_every_window_in_another_order() -> None:
    windows = Windows(ListedDocuments([[1] * 400]), WindowOptions(seq_len=4, rows=1, eos_id=EOS), shuffle=True)
    orders = [windows.order(epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(len(windows))) for order in orders)
    assert orders[0] != orders[1] != orders[2] and orders[1] == windows.order(1).tolist()


def test_continuous_windows_are_exact_and_the_end_belongs_to_its_document() -> None:
    options = WindowOptions(seq_len=4, rows=3, eos_id=EOS)
    dataset = WindowDataset(ListedDocuments([[1, 2, 3], [4, 5], [6, 7, EOS]]), options, shuffle=False)
    batch = dataset[[0, 1, 2]]
    assert batch.input_ids.tolist() == [[1, 2, 3, EOS], [4, 5, EOS, 6], [7, EOS, 0, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, -1, -1]], "the end is attended to"
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 0, 0]]
    assert batch.labels().tolist() == [[-100, 2, 3, EOS], [-100, 5, EOS, -100], [-100, EOS, -100, -100]]
    assert (batch.num_targets(), batch.num_targets(across_documents=True), batch.num_tokens) == (6, 7, 10)


def test_padding_with_the_end_of_text_hides_no_real_one() -> None:
    options = WindowOptions(seq_len=4, rows=1, eos_id=EOS, pad_id=EOS)
    batch = make_token_batch([(with_end(np.array([1, 2]), np.ones(2, np.bool_), EOS),)], options)
    assert batch.input_ids.tolist() == [[1, 2, EOS, EOS]]
    assert batch.labels().tolist() == [[-100, 2, EOS, -100]]
    assert batch.num_tokens == 3


def test_end_of_a_conversation_is_learnt_only_where_its_last_token_is() -> None:
    asked = with_end(np.array([1, 2]), np.array([True, False]), EOS)
    assert asked.loss_mask.tolist() == [True, False, False]
    assert with_end(*Piece(np.array([1, EOS]), np.array([True, True])), EOS).input_ids.tolist() == [1, EOS]


def test_loss_over_tokens_does_not_depend_on_how_rows_are_batched() -> None:
    ids = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10]]
    losses = []
    for rows in (1, 2, 3):
        options = WindowOptions(seq_len=4, rows=rows, eos_id=EOS, packing="document")
        dataset = WindowDataset(ListedDocuments(ids), options, shuffle=False)
        batches = [dataset[list(range(i, min(i + rows, len(dataset))))] for i in range(0, len(dataset), rows)]
        labels = [batch.labels()[:, 1:] for batch in batches]
        total = sum(float(label[label != -100].sum()) for label in labels)  # each label's loss is its id
        losses.append(total / sum(batch.num_targets() for batch in batches))
    assert losses[0] == pytest.approx(losses[1]) == pytest.approx(losses[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 2}, "no meaning with continuous"),
        ({"packing": "document", "stride": 9}, "would leave tokens out"),
        ({"min_tail_len": 9}, "no windows with"),
        ({"rows": 0}, "no windows with"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WindowOptions(**{"seq_len": 8, "rows": 1, "eos_id": EOS, **options})
