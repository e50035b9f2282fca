"""How one layer turns query-key products into weights, and the plain mathematics of it under a mask.

Legend: R rows, S queries per row, L keys per row, N query heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Scores:
    """How one layer turns query-key products into weights."""

    scale: float
    window: int | None = None
    """A query at p sees keys j with p - j < window."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None  # [N], one extra logit per head that takes weight and gives nothing

    @property
    def plain(self) -> bool:
        """Whether scaled_dot_product_attention can do it."""
        return self.softcap is None and self.sinks is None


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Bool, broadcast: causal, and nearer than ``window``."""
    distance = query_positions - key_positions
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def product_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention as two batched matrix products: [R, N, S, D], [R, G, L, D] -> [R, N, S, Dv].

    Query heads that share a key head stand side by side, so keys are never repeated. On a CPU with bfloat16 units it is
    twice as fast as the flash kernel up to 256 keys and for few queries (170 tokens 0.5 ms against 1.06 ms).

    Args:
        query: Any strides.
        key: Any strides; a view of a cache is not copied.
        value: Like ``key``.
        bias: [1 or R * G, group * S, L] in the query's dtype: 0 where a key is seen, else -inf.
        scale: Of the scores.
    """
    num_rows, num_heads, num_queries, width = query.shape
    pairs = num_rows * key.shape[1]
    query = query.reshape(pairs, -1, width)  # [R * G, group * S, D]
    key = key.reshape(pairs, -1, width)  # [R * G, L, D]
    weights = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale).softmax(-1)
    out = torch.bmm(weights, value.reshape(pairs, key.shape[1], -1))
    return out.view(num_rows, num_heads, num_queries, -1)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as numbers to add to scores."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """[R, N, S, D] under a bool mask [R or 1, 1, S, L] -> [R, N, S, Dv]; softcap and sinks included."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if scores.plain:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scale)
    logits = (query @ key.transpose(-1, -2)) * scores.scale  # [R, N, S, L]
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.float().masked_fill(~mask, float("-inf"))
    if scores.sinks is None:
        return logits.softmax(-1).to(value.dtype) @ value
    sinks = scores.sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    weights = torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
