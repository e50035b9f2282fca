"""The two small heads: a bias on the logits by the token before, and how likely a draft is accepted.

Legend: V vocabulary, H width, r rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """Logits of the next token get ``w2 @ w1[previous token]``, two factors of rank r."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        """Token ids [...] to the left factor [..., r]."""
        return F.embedding(previous, self.markov_w1.weight)


class ConfidenceHead(nn.Module):
    """A logit of the probability that a draft is accepted, from its state and the token before it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width + rank, 1)

    def forward(self, states: Tensor, left: Tensor) -> Tensor:
        """States [..., H] and left factors [..., r] to [...] float32."""
        with torch.autocast(states.device.type, enabled=False):
            both = torch.cat((states.float(), left.float()), dim=-1)
            return F.linear(both, self.proj.weight.float(), self.proj.bias.float()).squeeze(-1)
