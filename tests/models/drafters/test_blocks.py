"""Blocks, slot by slot, against plain Python."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from helixctl.data.batch import SlotBatch
from helixctl.models.drafters._blocks import make_blocks, slot_weights
from tests.models.drafters.dflash.builders import MASK, make_slot, packed_slot

B = 5


def reference_labels(slot: SlotBatch, row: int, anchor: int) -> list[int | None]:
    """Slot by slot, in plain Python: the token it predicts, or None."""
    documents, seq_len = slot.document_ids[row].tolist(), slot.document_ids.shape[1]
    labels: list[int | None] = [None]
    for k in range(1, B):
        i = anchor + k
        supervised = i < seq_len and documents[i] == documents[anchor] and bool(slot.loss_mask[row, i])
        labels.append(int(slot.input_ids[row, i]) if supervised else None)
    return labels


def test_labels_are_the_documents_own_next_tokens():
    slot = packed_slot()
    slot.loss_mask[0, 15] = False
    blocks = make_blocks(slot, B, MASK)
    for row, place in slot.anchor_valid.nonzero().tolist():
        expected = reference_labels(slot, row, int(slot.anchors[row, place]))
        got = zip(blocks.labels[row, place].tolist(), blocks.supervised[row, place].tolist(), strict=True)
        assert [label if supervised else None for label, supervised in got] == expected


@given(st.integers(0, 26), st.integers(2, 40))
def test_blocks_at_any_place_stay_inside_the_row(anchor: int, size: int):
    slot = make_slot([[27]], 27, [[anchor]])
    blocks = make_blocks(slot, size, MASK)
    assert int(blocks.supervised.sum()) == min(size - 1, 26 - anchor)
    assert blocks.positions[0, 0].tolist() == list(range(anchor, anchor + size))


def test_ids_positions_and_starts():
    slot = packed_slot()
    blocks = make_blocks(slot, B, MASK)
    assert blocks.ids[0, 3].tolist() == [int(slot.input_ids[0, 12]), *[MASK] * 4]
    assert blocks.positions[0, 3].tolist() == [3, 4, 5, 6, 7]  # 12 is the fourth token of the second document
    assert blocks.starts[0].tolist() == [0, 0, 0, 9, 9, 9]
    assert (blocks.ids[1, 3:] == MASK).all()
    assert not blocks.supervised[1, 3:].any()


def test_slot_weights_decay_or_do_not():
    torch.testing.assert_close(slot_weights(4, 2.0, torch.device("cpu")), torch.tensor([0.0, -0.5, -1.0]).exp())
    assert slot_weights(4, None, torch.device("cpu")).tolist() == [1.0, 1.0, 1.0]
