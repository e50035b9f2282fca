"""Attention of blocks to their context and to themselves: a dense reference and compiled flex_attention.

A query in block b sees the tokens of its document strictly before its anchor, and all slots of block b (where blocks
are causal: itself and those before it); nothing else. An invalid block sees its own slots only, so every row of every
backend is finite. ``_group_attention.py`` has the backend for CPUs.

Legend: R rows, S tokens per row, A anchors per row, B block size, N = blocks x B queries, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from helixctl.models.drafters._blocks import Blocks
from helixctl.models.flex import ordered, whole_blocks
from helixctl.models.private import compiled_here

TILE = 128
"""Queries or keys that flex_attention skips or visits together."""

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one side; the context's are [R, S, kv heads, D], the blocks' [N, kv heads, D]."""


class BlockAttention(Protocol):
    """Attention of one micro-batch, used by every layer."""

    @property
    def index(self) -> Tensor | None:
        """Which of the R * A blocks are computed, flat; None: all of them."""

    def __call__(self, query: Tensor, context: KeyValue, block: KeyValue) -> Tensor:
        """``query`` [N, heads, D] to [N, heads, D]."""


@dataclass(frozen=True, eq=False)  # hashed by identity: Dynamo hashes a callable before its fields exist
class DenseAttention:
    """One boolean mask over all keys: slow, obvious, works everywhere."""

    mask: Tensor  # [R, 1, A * B, S + A * B] bool
    index: Tensor | None = None

    def __call__(self, query: Tensor, context: KeyValue, block: KeyValue) -> Tensor:
        """See ``BlockAttention``."""
        q, k, v = _by_row(query, context, block)
        if q.is_cuda:  # a kernel there that takes a mask and keeps no scores wants as many heads on either side
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=not q.is_cuda)
        return out.transpose(1, 2).reshape(query.shape)


@dataclass(frozen=True, eq=False)
class FlexAttention:
    """Compiled flex_attention that skips key tiles no query of a tile may see."""

    block_mask: BlockMask
    index: Tensor | None = None

    def __call__(self, query: Tensor, context: KeyValue, block: KeyValue) -> Tensor:
        """See ``BlockAttention``."""
        q, k, v = _by_row(query, context, block)
        length = q.shape[2]
        # Less than one tile comes out wrong in torch 2.11 and 2.13; whole tiles need no checks at the border either.
        q, k, v = (whole_blocks(x, dim=2) for x in (q, k, v))
        out: Tensor = _flex(query.device.type)(q, k, v, self.block_mask)
        return out[:, :, :length].transpose(1, 2).reshape(query.shape)


def make_dense_attention(blocks: Blocks, document_ids: Tensor, *, causal: bool = False) -> DenseAttention:
    """The rule written down literally, from document ids ([R, S])."""
    rows, seq_len = document_ids.shape
    num_anchors, size = blocks.ids.shape[1:]
    keys = torch.arange(seq_len, device=document_ids.device)
    anchor_documents = document_ids.gather(1, blocks.anchors)
    context = keys < blocks.anchors[..., None]  # [R, A, S]
    context = context & (document_ids[:, None] == anchor_documents[..., None]) & blocks.valid[..., None]
    own = torch.eye(num_anchors, dtype=torch.bool, device=keys.device).repeat_interleave(size, 1)  # [A, A * B]
    mask = torch.cat((context, own.expand(rows, -1, -1)), dim=-1).repeat_interleave(size, 1)  # [R, A * B, S + A * B]
    if causal:
        slot = torch.arange(num_anchors * size, device=keys.device) % size
        mask[:, :, seq_len:] &= slot <= slot[:, None]
    return DenseAttention(mask[:, None])


def make_flex_attention(blocks: Blocks, seq_len: int, *, causal: bool = False) -> FlexAttention:
    """Mask of this micro-batch, built on the device at fixed shapes; sorted anchors keep its tiles dense."""
    num_anchors, size = blocks.ids.shape[1:]
    ends = torch.where(blocks.valid, blocks.anchors, 0)  # invalid: the context is empty
    starts = torch.where(blocks.valid, blocks.starts, 0)

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // size
        known = block.clamp(max=num_anchors - 1)  # queries that fill up the last tile have no block
        in_context = (key >= starts[row, known]) & (key < ends[row, known])
        in_block = (key - seq_len) // size == block
        if causal:
            in_block = in_block & (key - seq_len <= query)
        return torch.where(key < seq_len, in_context, in_block)

    queries, keys = (-(-length // TILE) * TILE for length in (num_anchors * size, seq_len + num_anchors * size))
    some, full = _visible_tiles(starts, ends, size, seq_len)
    by_query = (*ordered(some & ~full), *ordered(full))
    by_key = (*ordered((some & ~full).mT), *ordered(full.mT))  # for the backward pass
    mask = BlockMask((queries, keys), *by_query, *by_key, BLOCK_SIZE=(TILE, TILE), mask_mod=visible)
    return FlexAttention(mask)


def _visible_tiles(starts: Tensor, ends: Tensor, size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Which key tiles hold a visible key, and which are visible as a whole: [R, 1, query tiles, key tiles] bool each.

    By interval arithmetic on a few thousand numbers. ``create_block_mask`` evaluates every pair instead, and its
    compiled kernel keeps the assembler of torch 2.11 busy for minutes at 512 anchors and 3,072 tokens.

    Args:
        starts: [R, A] first context token of each block.
        ends: [R, A] one past the last context token of each block.
        size: B.
        seq_len: S.
    """
    num_queries = starts.shape[1] * size
    first_query = torch.arange(0, num_queries, TILE, device=starts.device)  # [query tiles]
    low = torch.arange(0, seq_len + num_queries, TILE, device=starts.device)  # [key tiles]
    first_block = first_query // size
    last_block = (first_query + TILE).clamp(max=num_queries).sub(1) // size
    spread = (TILE - 2) // size + 2  # blocks that a query tile touches at most
    members = first_block[:, None] + torch.arange(spread, device=starts.device)  # [query tiles, spread]
    members = members.minimum(last_block[:, None])  # the last one again where there are fewer
    start, end = starts[:, members, None], ends[:, members, None]  # [R, query tiles, spread, 1]
    in_context = (start < low + TILE) & (end > low) & (start < end)  # [R, query tiles, spread, key tiles]
    own_low, own_high = seq_len + first_block * size, seq_len + (last_block + 1) * size
    own = (own_low[:, None] < low + TILE) & (own_high[:, None] > low)  # [query tiles, key tiles]
    complete = (first_query + TILE <= num_queries)[:, None]
    full = ((start <= low) & (end >= low + TILE)).all(2) & complete
    return (in_context.any(2) | own)[:, None], full[:, None]


def _by_row(query: Tensor, context: KeyValue, block: KeyValue) -> tuple[Tensor, Tensor, Tensor]:
    """Row-wise [R, heads, length, D]: queries, then context keys and values followed by the blocks'."""
    rows = context[0].shape[0]
    q = query.view(rows, -1, *query.shape[1:]).transpose(1, 2)
    k, v = (
        torch.cat((own, side.view(rows, -1, *side.shape[1:])), dim=1).transpose(1, 2)
        for own, side in zip(context, block, strict=True)
    )
    return q, k, v


# is_dynamo_compiling, not is_compiling: the latter is process-global in torch 2.13 and reads True in an eager thread
# while another one compiles.
def _flex(device: str) -> Callable[..., Any]:
    if device == "cpu" or torch.compiler.is_dynamo_compiling():
        return _call_flex
    return compiled_here(_call_flex)


def _call_flex(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> Tensor:
    out: Tensor = flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)
    return out
