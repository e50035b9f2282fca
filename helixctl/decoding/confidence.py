"""How many drafts of a row are worth verifying: those that the drafter itself thinks likely to be accepted.

A drafter that knows tells, for each draft, the probability that the target accepts it if it accepts those before it.
The product up to a draft is the probability that the block is accepted up to there. It never rises, so a threshold cuts
a block at one place (https://arxiv.org/abs/2607.05147; its scheduler moves the threshold with the load of the engine).

Samples stay exact. Whether draft k is verified hangs on the context and on drafts 1 .. k-1. Given that these were
accepted, either draft k is verified, and the rejection rule makes the next token one of the target's, or it is not,
and the token is drawn from the target itself: one distribution both ways. A cut that knew draft k itself would keep the
likely ones and replace the others, which bends the distribution; hence a drafter tells before it draws, and is held to
that order. Greedy output is the target's own whatever is cut.

Legend: R rows, L lanes (rows of the drafter), T slots told of at a time, B block_size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from helixctl.decoding.policy import Choose
from helixctl.errors import UsageError


class Confidence:
    """What a drafter tells while it drafts one block per lane, and how much of each is then worth verifying.

    Args:
        choose: Makes drafts of logits; see ``DraftCall``.
        threshold: A draft is verified when it is accepted, with all before it, with at least this probability.
    """

    def __init__(self, choose: Choose, threshold: float) -> None:
        self._choose = choose
        self._threshold = threshold
        self._told: list[Tensor] = []  # [L, T] each
        self._num_told = 0
        self._num_chosen = 0

    def tell(self, probabilities: Tensor) -> None:
        """The next T drafts of each lane are accepted with ``probabilities`` [L, T] if those before them are."""
        self._told.append(probabilities)
        self._num_told += probabilities.shape[1]

    def choose(self, logits: Tensor) -> Tensor:
        """Drafts [L, T] from logits [L, T, V].

        Raises:
            UsageError: the drafter tells nothing.
        """
        self._num_chosen += logits.shape[1]
        if not self._told:
            raise UsageError("the drafter does not tell how sure it is", fix="decode without a confidence threshold")
        assert self._num_chosen <= self._num_told, "a drafter tells how sure it is of a draft before it draws the draft"
        return self._choose(logits)

    def verdict(self) -> Tensor:
        """How many leading drafts are worth verifying, and what was told of all: [L, 1 + (B-1)] float32."""
        told = torch.cat(self._told, dim=1).float()
        return torch.cat([worth_verifying(told, self._threshold)[:, None].float(), told], dim=1)


def worth_verifying(told: Tensor, threshold: float) -> Tensor:
    """How many leading drafts are accepted, each with all before it, with at least ``threshold``: [L] int64.

    Args:
        told: Probabilities [L, T] float32 of drafts, each given those before it. Their running product never rises.
        threshold: 0 verifies all.
    """
    return (told.cumprod(-1) >= threshold).sum(-1)
