"""Tiles of the flex mask against torch's own builder, which evaluates every pair."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from helixctl.models.drafters import _attention
from helixctl.models.drafters._blocks import make_blocks
from tests.models.drafters.dflash.builders import MASK, make_slot


@pytest.mark.parametrize(("size", "tile"), [(2, 8), (5, 8), (16, 8), (33, 8), (2, 32), (5, 32), (16, 32), (33, 32)])
def test_tiles_equal_those_of_torch(monkeypatch, size, tile):
    monkeypatch.setattr(_attention, "TILE", tile)
    anchors = [[0, 1, 31, 40, 41, 90, 95, 96, 130, 150, 190], [64, 180, 185]]
    blocks = make_blocks(make_slot([[40, 20, 132], [192]], 200, anchors, num_anchors=11), size, MASK)
    got = _attention.make_flex_attention(blocks, 200).block_mask
    lengths = (11 * size, 200 + 11 * size)
    expected = create_block_mask(got.mask_mod, 2, None, *lengths, device="cpu", BLOCK_SIZE=tile)
    assert got.seq_lengths == tuple(-(-length // tile) * tile for length in lengths)  # whole tiles
    assert torch.equal(got.to_dense(), expected.to_dense())  # none forgotten, none added
    # The same seen from the keys, for the backward pass.
    transposed = type(got).from_kv_blocks(
        got.kv_num_blocks,
        got.kv_indices,
        got.full_kv_num_blocks,
        got.full_kv_indices,
        tile,
        got.mask_mod,
        got.seq_lengths,
    )
    for name in ("q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(got, name), getattr(transposed, name))
    for count, numbers in (("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")):
        counted = torch.arange(getattr(got, numbers).shape[-1]) < getattr(got, count)[..., None]
        assert torch.equal(getattr(got, numbers)[counted], getattr(transposed, numbers)[counted])
    full, expected_full = (full_tiles(mask) for mask in (got, expected))
    # Full tiles inside a block that is longer than a tile are called partial: slower there, never wrong.
    assert full <= expected_full
    assert full == expected_full or size > tile


def full_tiles(mask):
    """(row, query tile, key tile) of every tile that needs no mask."""
    counts, indices = mask.full_kv_num_blocks, mask.full_kv_indices
    rows = counts.nonzero().tolist()
    return {(r, q, k) for r, h, q in rows for k in indices[r, h, q, : counts[r, h, q]].tolist()}
