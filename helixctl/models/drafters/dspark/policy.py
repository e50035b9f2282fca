"""Drafting during decoding: the backbone once per block, then the two small heads from slot to slot.

Legend: R rows, T new tokens, B block size, H width, V vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from helixctl.decoding.policy import DraftCall, NextLogits
from helixctl.models.drafters._head import head_logits
from helixctl.models.drafters.dflash.model import DFlashDraftModel
from helixctl.models.drafters.dflash.policy import DFlashPolicy
from helixctl.models.drafters.dspark.heads import ConfidenceHead, MarkovHead
from helixctl.models.shared import SharedWeights


class DSparkPolicy:
    """Drafts of B-1 tokens, each given the one before it; tells how likely each is to be accepted, where asked."""

    def __init__(self, model: DFlashDraftModel, shared: SharedWeights) -> None:
        self._backbone = DFlashPolicy(model, shared)
        self.block_size = self._backbone.block_size
        markov, confidence = self._backbone.model.markov_head, self._backbone.model.confidence_head
        assert isinstance(markov, MarkovHead) and isinstance(confidence, ConfidenceHead)
        self._markov, self._confidence = markov, confidence
        self._head = self._backbone.head

    def start(self, num_rows: int, max_len: int) -> None:
        """Forget everything; make room for ``num_rows`` rows of ``max_len`` context tokens."""
        self._backbone.start(num_rows, max_len)

    def extend(self, features: Sequence[Tensor], positions: Tensor, valid: Tensor) -> None:
        """Add context: K x [R, T, H] features at ``positions`` [R, T]; entries with ``valid`` False are ignored."""
        self._backbone.extend(features, positions, valid)

    def draft(self, anchor_ids: Tensor, positions: Tensor, call: DraftCall) -> Tensor:
        """Tokens [R, call.size - 1] that follow ``anchor_ids`` [R], which stand at ``positions`` [R]."""
        states = self._backbone.draft_states(anchor_ids, positions, size=call.size, length=call.length)
        raw = self._raw_logits(states)
        drafts, previous = [], anchor_ids
        for k in range(raw.shape[1]):
            if call.tell is not None:
                call.tell(self._sure(states[:, k : k + 1], previous[:, None]))
            previous = call.choose(self._given(raw[:, k : k + 1], previous[:, None]))[:, 0]
            drafts.append(previous)
        return torch.stack(drafts, dim=1)

    def branch(self, anchor_ids: Tensor, positions: Tensor, call: DraftCall) -> NextLogits:
        """A tree's candidates: the sequential head looks at each candidate of the slot before; see ``TreePolicy``.

        Takes memory for the logits of all candidates of a slot.
        """
        states = self._backbone.draft_states(anchor_ids, positions, size=call.size, length=call.length)
        raw = self._raw_logits(states)
        return lambda slot, tokens: self._given(raw[:, slot : slot + 1], tokens)

    def draft_logits(self, anchor_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [R, B-1, V] without the sequential head, which needs tokens; see ``logits_given``."""
        return self._backbone.draft_logits(anchor_ids, positions)

    def logits_given(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [R, B-1, V] of the tokens behind ``tokens`` [R, B-1], the first of which stands at ``positions``."""
        return self._given(self._raw_logits(self._backbone.draft_states(tokens[:, 0], positions)), tokens)

    @torch.no_grad()
    def _raw_logits(self, states: Tensor) -> Tensor:
        """The head's products [R, T, V] alone; bias and softcap come when the sequential part has been added."""
        return head_logits(states, replace(self._head, bias=None, softcap=None))

    @torch.no_grad()
    def _sure(self, states: Tensor, previous: Tensor) -> Tensor:
        """Probability [R, T] float32 that a draft is accepted, from its state and the token before it [R, T]."""
        logits: Tensor = self._confidence(states, self._markov(previous))
        return logits.sigmoid()

    @torch.no_grad()
    def _given(self, raw: Tensor, previous: Tensor) -> Tensor:
        """Logits [R, T, V] from products [R, T, V], or [R, 1, V] for all, and the tokens before them [R, T]."""
        logits = raw + self._markov(previous).to(raw.dtype) @ self._markov.markov_w2.weight.to(raw.dtype).t()
        if self._head.bias is not None:
            logits = logits + self._head.bias.to(logits.dtype)
        cap = self._head.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
