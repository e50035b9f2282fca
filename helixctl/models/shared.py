"""What a drafter borrows from the target: embedding, head, final norm. Frozen, and on one device there is one of each.

Legend: V vocabulary rows, H target width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class SharedWeights:
    """Frozen tensors of the target; the same storage as the target's own where the device is the same."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]; the embedding itself where the two are tied
    head_bias: Tensor | None  # [V]
    embedding_scale: float
    """A token's input is its row of the embedding times this (Gemma: sqrt(H))."""
    logit_softcap: float | None
    """Logits become softcap * tanh(logits / softcap)."""
    final_norm: nn.Module
    """Between the last layer's output and the head."""

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] -> inputs of the first layer [..., H]."""
        rows = functional.embedding(ids, self.embedding)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def to(self, device: torch.device) -> SharedWeights:
        """A copy on ``device``; the embedding and a head tied to it stay one tensor."""
        embedding = self.embedding.to(device)
        return SharedWeights(
            embedding=embedding,
            head=embedding if self.head is self.embedding else self.head.to(device),
            head_bias=None if self.head_bias is None else self.head_bias.to(device),
            embedding_scale=self.embedding_scale,
            logit_softcap=self.logit_softcap,
            final_norm=copy.deepcopy(self.final_norm).to(device),
        )

    def logits(self, normed: Tensor) -> Tensor:
        """States after the final norm [..., H] -> logits [..., V] in the same dtype."""
        flat = normed.reshape(-1, normed.shape[-1])  # see head_logits of the drafters: strided operands are slow
        logits = functional.linear(flat, self.head, self.head_bias).view(*normed.shape[:-1], -1)
        if self.logit_softcap is None:
            return logits
        return torch.tanh(logits / self.logit_softcap) * self.logit_softcap
