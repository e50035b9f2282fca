"""From logits to samples: temperature, top-k and top-p, and the rejection rule that keeps drafted samples the target's.

A drafter draws token d from its distribution q; the target, whose distribution is p, keeps it with probability
min(1, p(d) / q(d)). The first draft that is not kept is replaced by a draw from max(p - q, 0), and where all are kept a
bonus token is drawn from p. What comes out is then distributed as p, whatever q is (https://arxiv.org/abs/2211.17192).

Legend: R rows, L lanes (rows of the drafter), T tokens per row, B block_size, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 1.0 - 2.0**-24
"""Largest float32 below 1. A number rounded up to 1 would choose a token behind the last one of any weight."""


@dataclass(frozen=True)
class Sampling:
    """Which distribution tokens are drawn from: the logits' own, sharpened, then cut, in this order."""

    temperature: float
    """Logits are divided by it; positive."""
    top_k: int | None = None
    """Only so many best tokens are drawn, and those that tie with the last of them."""
    top_p: float = 1.0
    """Only the best tokens are drawn, up to the first with which they weigh at least so much."""


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Distribution [..., V] float32, sums to 1, that is drawn from for logits [..., V]; not in place."""
    scores = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        lowest = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    shares = scores.softmax(-1)
    return shares if sampling.top_p >= 1.0 else _nucleus(shares, sampling)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [...] int64 drawn in proportion to ``weights`` [..., V], by the inverse of their running sum.

    A token without weight is never drawn as long as another one has some.

    Args:
        weights: Non-negative, not all zero.
        uniforms: [...] in [0, 1), one per draw.
    """
    running = weights.cumsum(-1)
    places = uniforms.clamp(max=LARGEST).unsqueeze(-1) * running[..., -1:]
    picked = torch.searchsorted(running, places, right=True).squeeze(-1)
    return picked.clamp_(max=weights.shape[-1] - 1)


def judge_drafts(
    target: Tensor, drafter: Tensor, drafts: Tensor, uniforms: Tensor, limits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rejection rule for whole blocks.

    Args:
        target: p [R, T, V], what the target draws the token after each column from.
        drafter: q [R, T-1, V], what each draft was drawn from.
        drafts: [R, T-1] int64.
        uniforms: [R, T] in [0, 1): one per draft, and one for the token that follows the kept ones.
        limits: How many drafts of each row are judged, [R] int64, as if it had no more; None: all.

    Returns:
        How many drafts are kept, [R] int64, and tokens [R, T] int64: the kept drafts, then the new token; what follows
        it means nothing.
    """
    index = drafts.unsqueeze(-1)
    wanted = target[:, :-1].gather(-1, index).squeeze(-1)  # [R, T-1]
    offered = drafter.gather(-1, index).squeeze(-1)
    kept = uniforms[:, :-1] * offered < wanted
    if limits is not None:
        kept &= torch.arange(drafts.shape[1], device=limits.device) < limits[:, None]
    num_kept = kept.long().cumprod(-1).sum(-1)  # [R]
    place = num_kept.view(-1, 1, 1).expand(-1, 1, target.shape[-1])
    p = target.gather(1, place).squeeze(1)  # [R, V]
    rest = p
    if drafts.shape[1]:
        q = drafter.gather(1, place.clamp(max=drafts.shape[1] - 1)).squeeze(1)
        left = (p - q).clamp(min=0.0)
        judged = drafts.shape[1] if limits is None else limits
        rejected = (num_kept < judged).unsqueeze(-1) & (left.sum(-1, keepdim=True) > 0)
        rest = torch.where(rejected, left, p)  # p also where rounding leaves nothing: then p and q are the same
    new = draw(rest, uniforms[:, -1])
    tokens = torch.cat([drafts, new[:, None]], dim=1).scatter(1, num_kept[:, None], new[:, None])
    return num_kept, tokens


class SampledBlock:
    """The random side of one cycle: draws the drafts, remembers what they were drawn from, judges them.

    Args:
        sampling: of drafter and target alike.
        uniforms: [L, 2 * B - 1] in [0, 1): B - 1 to draft with, then B to judge with.
    """

    def __init__(self, sampling: Sampling, uniforms: Tensor) -> None:
        self._sampling = sampling
        num_drafts = uniforms.shape[1] // 2
        self._to_draft, self._to_judge = uniforms[:, :num_drafts], uniforms[:, num_drafts:]
        self._drawn: list[Tensor] = []  # [L, T, V] each

    def choose(self, logits: Tensor) -> Tensor:
        """Drafts [L, T] for the next T slots of the block, from the drafter's logits [L, T, V]."""
        start = sum(part.shape[1] for part in self._drawn)
        shares = probabilities(logits, self._sampling)
        self._drawn.append(shares)
        return draw(shares, self._to_draft[:, start : start + logits.shape[1]])

    def judge(
        self, drafts: Tensor, logits: Tensor, lanes: Tensor, limits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Judge the first T - 1 drafts of the rows that decode.

        Args:
            drafts: [R, T-1] int64.
            logits: Of the target, [R, T, V].
            lanes: [R] int64, each row's lane.
            limits: As for ``judge_drafts``.

        Returns:
            As ``judge_drafts``.
        """
        target = probabilities(logits, self._sampling)
        num_drafts = drafts.shape[1]
        uniforms = self._to_judge[lanes]  # [R, B]
        # The new token's is always the last, so that a row does not notice when others make the blocks shorter.
        uniforms = torch.cat([uniforms[:, :num_drafts], uniforms[:, -1:]], dim=1)  # [R, T]
        drawn = torch.cat(self._drawn, dim=1)[lanes, :num_drafts] if num_drafts else target[:, :0]
        return judge_drafts(target, drawn, drafts, uniforms, limits)

    def answer(self, logits: Tensor, depths: Tensor, lanes: Tensor) -> Tensor:
        """What the target draws behind every node of a tree: nodes of one depth share a number, a path has one of each.

        Args:
            logits: Of the target, [R, T, V].
            depths: [R, T] int64, below B.
            lanes: [R] int64, each row's lane.

        Returns:
            Tokens [R, T] int64.
        """
        return draw(probabilities(logits, self._sampling), self._to_judge[lanes].gather(1, depths))


def sample_tokens(logits: Tensor, sampling: Sampling, generators: Sequence[random.Random]) -> Tensor:
    """Sample [R] int64 from logits [R, V] with one uniform number per row, from the row's own generator."""
    uniforms = torch.tensor([g.random() for g in generators], device=logits.device)
    return draw(probabilities(logits, sampling), uniforms)


def _nucleus(shares: Tensor, sampling: Sampling) -> Tensor:
    """The best tokens of ``shares`` [..., V] that weigh ``top_p`` together, normalised."""
    size = min(sampling.top_k or shares.shape[-1], shares.shape[-1])
    # Ties with the k-th best would be cut here; they weigh less than rounding in any real vocabulary, and stay out of
    # both p and q alike. Without top_k this is a full sort.
    best, order = shares.topk(size, dim=-1) if size < shares.shape[-1] else shares.sort(dim=-1, descending=True)
    before = best.cumsum(-1) - best
    cut = before >= sampling.top_p
    cut[..., 0] = False  # one is always left
    best = best.masked_fill(cut, 0.0)
    kept = torch.zeros_like(shares).scatter_(-1, order, best)
    return kept / kept.sum(-1, keepdim=True)
