"""From logits to tokens: the best one and its margin; and how many drafts a target accepts. `sampling.py` draws.

Legend: R rows, T tokens per row, V vocabulary.
"""

from __future__ import annotations

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


def accepted_drafts(drafts: Tensor, choices: Tensor, limits: Tensor | None = None) -> Tensor:
    """Length [R] int64 of the longest prefix of `drafts` [R, T-1] that equals the target's `choices` [R, T].

    At most `limits` [R] int64, where given.
    """
    length = (drafts == choices[:, :-1]).long().cumprod(-1).sum(-1)
    return length if limits is None else length.minimum(limits)
