"""Packed documents by flex_attention with a block mask of our own, made on the CPU without a look at the device.

``create_block_mask`` is not used: it edits a process-wide table while other threads compile, and evaluates the whole
[S, S] mask on the device for what a few comparisons of block borders give.

Legend: R rows, S tokens per row, Q blocks of 128 tokens per row, N heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from helixctl.models.private import compile_fixed, private
from helixctl.models.scores import Scores

BLOCK = 128
"""Tokens per side of a block: flex_attention's own default."""

FlexCall = Callable[..., Any]


def make_flex(*, compiled: bool) -> FlexCall:
    """flex_attention for one target.

    Each call returns its own code object: torch misses guards when warm threads share one. Not compiled it is slow and
    traces, which is not safe beside other threads; tests only.
    """
    call = private(_call)
    return compile_fixed(call) if compiled else call


def _call(query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: BlockMask) -> Any:
    cap = scores.softcap

    def capped(score: Tensor, _row: Tensor, _head: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        assert cap is not None
        return cap * torch.tanh(score / cap)

    return flex_attention(
        query,
        key,
        value,
        score_mod=None if cap is None else capped,
        block_mask=mask,
        scale=scores.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if scores.sinks is None else AuxRequest(lse=True),
    )


class FlexPacking:
    """Rule for packed rows (see ``attention.Rule``). Block masks are made once per micro-batch and window.

    Rows are padded to whole blocks: in torch 2.11 and 2.13 rows of less than a block come out wrong, without a word.
    """

    def __init__(self, call: FlexCall, host_ids: Tensor, device_ids: Tensor) -> None:
        """Masks are made where ``host_ids`` is: on the CPU, or, as ``device_ids``, inside a captured graph."""
        self.num_calls = 0
        self._call = call
        self._host_ids = host_ids  # [R, S] on the CPU
        self._device_ids = device_ids  # the same on the device
        self._masks: dict[int | None, BlockMask] = {}

    def make_masks(self, windows: Iterable[int | None]) -> None:
        """Make the masks of ``windows`` now; compiled layers only read them."""
        for window in windows:
            if window not in self._masks:
                self._masks[window] = document_blocks(self._host_ids, self._device_ids, window)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[R, N, S, D] -> [R, S, N, Dv]."""
        # Not is_compiling: that one is true in every thread while one compiles.
        inside = torch.compiler.is_dynamo_compiling()
        if not inside:
            self.make_masks([scores.window])
        call = _call if inside else self._call
        seq_len = query.shape[2]
        query, key, value = (whole_blocks(x, dim=2) for x in (query, key, value))
        found = call(query, key, value, scores, self._masks[scores.window])
        out: Tensor = found if scores.sinks is None else found[0]
        if scores.sinks is not None:
            # softmax with one more logit s: all weights shrink by exp(lse) / (exp(lse) + exp(s)).
            share = torch.sigmoid(found[1].lse - scores.sinks.float()[None, :, None])  # [R, N, S]
            out = out * share[..., None].to(out.dtype)
        return out[:, :, :seq_len].transpose(1, 2)


def document_blocks(host_ids: Tensor, device_ids: Tensor, window: int | None) -> BlockMask:
    """Block mask of causal attention within documents (and ``window``), on the device of ``device_ids``.

    Args:
        host_ids: [R, S] int32 on the CPU: 0, 1, ... in order, -1 on padding, which stands at the end.
        device_ids: The same on the device.
        window: Tokens that a query sees back, itself included.
    """
    host_ids, device_ids = whole_blocks(host_ids, dim=1, value=-1), whole_blocks(device_ids, dim=1, value=-1)
    ids = host_ids.masked_fill(host_ids < 0, torch.iinfo(torch.int32).max)  # ascending along the row
    seq_len, num_blocks = ids.shape[1], ids.shape[1] // BLOCK
    ids = ids.view(len(ids), num_blocks, BLOCK)  # [R, Q, 128]
    first, last = ids[..., 0], ids[..., -1]  # [R, Q]
    block = torch.arange(num_blocks, device=ids.device)
    ahead = block[:, None] - block[None, :]  # [Q, Q], blocks that the query's is behind the key's
    touches = (ahead >= 0) & (last[:, None, :] >= first[:, :, None])  # [R, Q, Q]
    inside = (ahead > 0) & (first[:, None, :] == last[:, :, None])
    if window is not None:
        touches = touches & ((ahead - 1) * BLOCK + 1 < window)
        inside = inside & ((ahead + 1) * BLOCK - 1 < window)

    def seen(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        together = (query >= key) & (device_ids[row, query] == device_ids[row, key])
        return together if window is None else together & (query - key < window)

    partial = _lists(touches & ~inside, device_ids.device)
    full = _lists(inside, device_ids.device)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(seq_len, seq_len))


def whole_blocks(x: Tensor, dim: int, value: int = 0) -> Tensor:
    """``x`` with its ``dim`` padded to a multiple of ``BLOCK``."""
    missing = -x.shape[dim] % BLOCK
    return pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing), value=value) if missing else x


def _lists(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """[R, Q, Q] bool -> (counts [R, 1, Q], key blocks with the wanted ones first [R, 1, Q, Q]), int32 on ``device``."""
    counts, order = ordered(blocks[:, None])
    return counts.to(device, non_blocking=True), order.to(device, non_blocking=True)


def ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the last axis are set, and their numbers in order, as ``BlockMask`` wants them.

    Args:
        tiles: bool [..., n].

    Returns:
        int32 counts [...] and numbers [..., n], the set ones first.
    """
    num_tiles = tiles.shape[-1]
    # By counting, not sorting: a compiled sort of this length is slow to build.
    place = torch.where(tiles, tiles.long().cumsum(-1) - 1, num_tiles)  # the unset ones share a place that is cut off
    numbers = torch.arange(num_tiles, device=tiles.device, dtype=torch.int32).expand(tiles.shape)
    order = numbers.new_zeros((*tiles.shape[:-1], num_tiles + 1)).scatter(-1, place, numbers)
    return tiles.sum(-1).to(torch.int32), order[..., :num_tiles].contiguous()
