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

from collections.abc import Sequence

import torch
from torch import Tensor

from helixctl.decoding.policy import Choose
from helixctl.errors import UsageError


class Confidence:
    """What a drafter tells while it drafts one block per lane.

    Args:
        choose: Makes drafts of logits; see ``DraftCall``.
    """

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
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

    def read(self, lanes: Tensor) -> list[list[float]]:
        """What was told of ``lanes`` [R] int64: [R][B-1]. Waits for the device."""
        found: list[list[float]] = torch.cat(self._told, dim=1)[lanes].tolist()
        return found


def worth_verifying(probabilities: Sequence[float], threshold: float) -> int:
    """How many leading drafts are accepted, each with all before it, with a probability of at least ``threshold``."""
    survival, count = 1.0, 0
    for probability in probabilities:
        survival *= probability
        if survival < threshold:
            break
        count += 1
    return count
