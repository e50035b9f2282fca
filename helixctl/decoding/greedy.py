"""From logits to tokens: the best one, its margin, or a sample; and how many drafts a target accepts.

Legend: R rows, T tokens per row, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor


def best_tokens(logits: Tensor) -> Tensor:
    """Greedy choice [R, T] int64 from logits [R, T, V]; the lowest id wins a tie.

    On a CPU argmax takes five times as long as max in bfloat16 (5.7 against 1.0 ms for 32 rows of 49152).
    """
    return logits.max(-1).indices


def margins(logits: Tensor, best: Tensor) -> Tensor:
    """Gap [R, T] float32 between the best logit and the second best of [R, T, V]; `best` [R, T] is the best token.

    With the best known, a second maximum is cheaper than topk.
    """
    index = best.unsqueeze(-1)
    top = logits.gather(-1, index)
    second = logits.scatter(-1, index, float("-inf")).amax(-1, keepdim=True)
    return (top.float() - second.float()).squeeze(-1)


def accepted_drafts(drafts: Tensor, choices: Tensor) -> Tensor:
    """Length [R] int64 of the longest prefix of `drafts` [R, T-1] that equals the target's `choices` [R, T]."""
    return (drafts == choices[:, :-1]).long().cumprod(-1).sum(-1)


def sample_tokens(logits: Tensor, temperature: float, generators: Sequence[random.Random]) -> Tensor:
    """Sample [R] int64 from logits [R, V] with one uniform number per row, from the row's own generator."""
    weights = torch.softmax(logits.float() / temperature, dim=-1).cumsum(-1)
    uniform = torch.tensor([g.random() for g in generators], device=logits.device)
    picked = torch.searchsorted(weights, uniform[:, None] * weights[:, -1:], right=True).squeeze(-1)
    return picked.clamp_(max=logits.shape[-1] - 1)
