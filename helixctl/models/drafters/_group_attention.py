"""Attention of blocks on a CPU: neighbouring anchors of a row share one small product with their context.

No full score matrix exists, invalid blocks are not computed at all, and the gradient is written out because the
library's masked CPU attention spends three times as long in backward (measured: 48 queries x 9 heads x 550 keys, 4 ms).

Legend: R rows, S tokens per row, n computed blocks, B block size, G blocks of a group, C context tokens of a group,
N = n * B queries, h kv heads, r query heads per kv head, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from helixctl.models.drafters._attention import KeyValue
from helixctl.models.drafters._blocks import Blocks

MAX_BLOCKS = 16
"""Blocks per group at most: more share keys better but also compute more hidden scores."""
MIN_BLOCKS = 4
"""A group smaller than this may span documents; many tiny calls cost more than hidden scores."""


@dataclass(frozen=True)
class Group:
    """Neighbouring blocks of one row, and the context tokens any of them sees."""

    row: int
    first: int
    """First query among the N."""
    last: int
    """One past the last query."""
    start: int
    """First context token."""
    end: int
    """One past the last context token."""
    hidden: Tensor  # [G * B, C + G * B] bool, True where a query must not look


@dataclass(frozen=True, eq=False)
class GroupAttention:
    """Attention of one micro-batch; see ``BlockAttention``."""

    groups: tuple[Group, ...]
    index: Tensor | None  # [n] int64

    def __call__(self, query: Tensor, context: KeyValue, block: KeyValue) -> Tensor:
        """``query`` [N, heads, D] to [N, heads, D]."""
        out: Tensor = _Attend.apply(query, *context, *block, self.groups)  # type: ignore[no-untyped-call]  # torch
        return out


def make_group_attention(blocks: Blocks, *, causal: bool = False) -> GroupAttention:
    """Groups of this micro-batch, from anchors on the CPU; ``causal``: slots do not see later ones of their block."""
    index = blocks.valid.flatten().nonzero().squeeze(1)
    num_anchors = blocks.anchors.shape[1]
    anchors = blocks.anchors.flatten()[index].tolist()
    starts = blocks.starts.flatten()[index].tolist()
    rows = (index // num_anchors).tolist()
    groups, first = [], 0
    for last in range(1, len(rows) + 1):
        if last < len(rows) and not _ends_group(rows, starts, first, last):
            continue
        group = _make_group(rows[first], (first, last), (starts[first:last], anchors[first:last]), blocks.size)
        groups.append(_causal(group) if causal else group)
        first = last
    return GroupAttention(tuple(groups), index)


def _ends_group(rows: list[int], starts: list[int], first: int, last: int) -> bool:
    """Whether block ``last`` begins another group than the one that began at ``first``."""
    size = last - first
    return rows[last] != rows[first] or size >= MAX_BLOCKS or (starts[last] != starts[last - 1] and size >= MIN_BLOCKS)


def _make_group(row: int, span: tuple[int, int], context: tuple[list[int], list[int]], size: int) -> Group:
    starts, ends = (torch.tensor(side) for side in context)  # [G] each
    low, high = int(starts.min()), int(ends.max())
    keys = torch.arange(low, high)
    outside = (keys < starts[:, None]) | (keys >= ends[:, None])  # [G, C]
    other = ~torch.eye(len(starts), dtype=torch.bool).repeat_interleave(size, 1)  # [G, G * B]
    hidden = torch.cat((outside, other), dim=1).repeat_interleave(size, 0)
    return Group(row, span[0] * size, span[1] * size, low, high, hidden)


def _causal(group: Group) -> Group:
    """The same group with later slots hidden."""
    slot = torch.arange(group.last - group.first)
    later = slot > slot[:, None]  # of another block: hidden already
    hidden = group.hidden.clone()
    hidden[:, group.end - group.start :] |= later
    return replace(group, hidden=hidden)


class _Attend(torch.autograd.Function):
    """softmax(q k' / sqrt(D)) v by groups, scores in float32, probabilities kept in the compute type."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, k_context, v_context, k_block, v_block, groups = inputs
        out = torch.empty_like(query)
        probabilities = []
        for group in groups:
            q = _fold(query, group, k_block.shape[1])  # [h, r * G * B, D]
            k = _keys(k_context, k_block, group)  # [h, C + G * B, D]
            p = _softmax(torch.bmm(q, k.transpose(1, 2)), group.hidden, q.shape[-1] ** -0.5).to(query.dtype)
            _unfold(out, torch.bmm(p, _keys(v_context, v_block, group)), group)
            probabilities.append(p)
        ctx.groups = groups
        ctx.save_for_backward(query, k_context, v_context, k_block, v_block, out, *probabilities)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, k_context, v_context, k_block, v_block, out, *probabilities = ctx.saved_tensors
        (grad,) = grads
        inner = (grad.float() * out.float()).sum(-1, keepdim=True)  # [N, heads, 1]
        # Context keys are shared by groups: their gradients add up in float32.
        dk_context, dv_context = (torch.zeros_like(t, dtype=torch.float32) for t in (k_context, v_context))
        dq, dk_block, dv_block = torch.empty_like(query), torch.empty_like(k_block), torch.empty_like(v_block)
        num_kv, scale = k_block.shape[1], query.shape[-1] ** -0.5
        for group, p in zip(ctx.groups, probabilities, strict=True):
            g = _fold(grad, group, num_kv)
            _scatter(dv_context, dv_block, torch.bmm(p.transpose(1, 2), g), group)
            d = torch.bmm(g, _keys(v_context, v_block, group).transpose(1, 2)).float()
            d = d.sub_(_fold(inner, group, num_kv)).mul_(p).mul_(scale).to(query.dtype)  # gradient of q k'
            _unfold(dq, torch.bmm(d, _keys(k_context, k_block, group)), group)
            _scatter(dk_context, dk_block, torch.bmm(d.transpose(1, 2), _fold(query, group, num_kv)), group)
        return dq, dk_context.to(query.dtype), dv_context.to(query.dtype), dk_block, dv_block, None


def _fold(x: Tensor, group: Group, num_kv: int) -> Tensor:
    """Queries of a group, [N, heads, *] to [h, r * G * B, *]: the heads of one kv head stand behind each other."""
    part = x[group.first : group.last]  # [G * B, heads, *]
    return part.transpose(0, 1).reshape(num_kv, -1, part.shape[-1])


def _unfold(out: Tensor, part: Tensor, group: Group) -> None:
    """Write [h, r * G * B, D] back to its place in ``out`` [N, heads, D]."""
    out[group.first : group.last] = part.view(out.shape[1], -1, out.shape[2]).transpose(0, 1)


def _keys(context: Tensor, block: Tensor, group: Group) -> Tensor:
    """Keys or values of a group, context first: [h, C + G * B, D]."""
    sides = (context[group.row, group.start : group.end], block[group.first : group.last])
    return torch.cat(sides).transpose(0, 1).contiguous()


def _softmax(scores: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Float32 softmax of ``scores`` [h, r * G * B, keys]; hidden keys get exactly 0."""
    scaled = scores.float().mul_(scale)
    scaled.view(scores.shape[0], -1, *hidden.shape).masked_fill_(hidden, float("-inf"))
    return torch.softmax(scaled, dim=-1)


def _scatter(context: Tensor, block: Tensor, part: Tensor, group: Group) -> None:
    """Add the gradient of ``_keys`` [h, C + G * B, D] to the two sides."""
    by_key = part.transpose(0, 1)
    split = group.end - group.start
    context[group.row, group.start : group.end] += by_key[:split]
    block[group.first : group.last] = by_key[split:]
