"""Drafting during decoding: context keys and values are cached per layer, block ones never are.

Legend: R rows, T new tokens, L cache length, B block size, W slots, K taps, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from helixctl.decoding.policy import DraftCall, NextLogits
from helixctl.models.drafters._attention import KeyValue
from helixctl.models.drafters._head import head_logits, make_head
from helixctl.models.drafters.dflash.model import DFlashDraftModel
from helixctl.models.shared import SharedWeights


class DFlashPolicy:
    """Drafts of B-1 tokens, all slots at once, each from its own distribution; blocks as the model's variant has them.

    Weights are a snapshot taken when the policy is made, in the type of the target's head and on its device.
    A cached key at position j is visible to a block whose anchor stands at p iff j < p. So taking back rejected
    tokens needs no work: the next ``extend`` writes over their positions.
    """

    def __init__(self, model: DFlashDraftModel, shared: SharedWeights) -> None:
        self.block_size = model.options.block_size
        self.model = _snapshot(model, shared.head)
        self.head = make_head(shared)
        self._shared = shared
        self._cache: list[KeyValue] = []  # per layer [R, L + 1, kv heads, D]; the last place takes what is not valid

    def start(self, num_rows: int, max_len: int) -> None:
        """Forget everything; make room for ``num_rows`` rows of ``max_len`` context tokens."""
        shape = self.model.shape
        size = (num_rows, max_len + 1, shape.num_kv_heads, shape.head_dim)
        head = self._shared.head
        self._cache = [(head.new_zeros(size), head.new_zeros(size)) for _ in range(shape.num_layers)]

    @torch.no_grad()
    def extend(self, features: Sequence[Tensor], positions: Tensor, valid: Tensor) -> None:
        """Add context: K x [R, T, H] features at ``positions`` [R, T]; entries with ``valid`` False are ignored."""
        context = self.model.project_features(features)
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        for new, cached in zip(self.model.context_key_values(context, positions), self._cache, strict=True):
            place = torch.where(valid, positions, cached[0].shape[1] - 1)
            for side, store in zip(new, cached, strict=True):
                store[rows, place] = side

    def draft(self, anchor_ids: Tensor, positions: Tensor, call: DraftCall) -> Tensor:
        """Tokens [R, call.size - 1] that follow ``anchor_ids`` [R], which stand at ``positions`` [R]."""
        return call.choose(self.draft_logits(anchor_ids, positions, size=call.size, length=call.length))

    def branch(self, anchor_ids: Tensor, positions: Tensor, call: DraftCall) -> NextLogits:
        """A tree's candidates: those of a slot are the same behind all candidates of the slot before.

        The slots of one parallel forward hold mask tokens, whatever is chosen for them, so their distributions are all
        that it gives, with causal blocks and without.
        """
        logits = self.draft_logits(anchor_ids, positions, size=call.size, length=call.length)
        return lambda slot, tokens: logits[:, slot, None]

    @torch.no_grad()
    def draft_logits(
        self, anchor_ids: Tensor, positions: Tensor, *, size: int | None = None, length: int | None = None
    ) -> Tensor:
        """Logits [R, B-1, V] of the drafted tokens; ``size``: B, if smaller; ``length``: see ``DraftCall``."""
        return head_logits(self.draft_states(anchor_ids, positions, size=size, length=length), self.head)

    @torch.no_grad()
    def draft_states(
        self, anchor_ids: Tensor, positions: Tensor, *, size: int | None = None, length: int | None = None
    ) -> Tensor:
        """What the head reads of them: [R, B-1, H]."""
        rows, model = anchor_ids.shape[0], self.model
        num_slots = (self.block_size if size is None else size) - model.variant.shift  # W
        ids = torch.full((rows, num_slots), model.options.mask_token_id, device=anchor_ids.device)
        ids[:, 0] = anchor_ids
        slots = positions[:, None] + torch.arange(num_slots, device=positions.device)  # [R, W]
        length = int(positions.max()) if length is None else length  # a wait; keys beyond it are not read at all
        contexts = [(keys[:, :length], values[:, :length]) for keys, values in self._cache]
        visible = torch.arange(length, device=positions.device) < positions[:, None]  # [R, length]
        own = torch.ones(num_slots, num_slots, dtype=torch.bool, device=positions.device)
        own = own.tril() if model.variant.causal else own
        sides = (visible[:, None].expand(-1, num_slots, -1), own.expand(rows, -1, -1))
        attention = _CachedAttention(torch.cat(sides, dim=-1)[:, None])
        h = model.embed(ids.flatten(), self._shared)
        h = model.run_layers(h, model.rotary(slots.flatten()), contexts, attention)
        return h.view(rows, num_slots, -1)[:, 1 - model.variant.shift :]


@dataclass(frozen=True, eq=False)
class _CachedAttention:
    """One block per row over its cached context; see ``BlockAttention``."""

    mask: Tensor  # [R, 1, W, length + W] bool
    index: Tensor | None = None

    def __call__(self, query: Tensor, context: KeyValue, block: KeyValue) -> Tensor:
        rows = context[0].shape[0]
        q = query.view(rows, -1, *query.shape[1:]).transpose(1, 2)
        k, v = (
            torch.cat((old, new.view(rows, -1, *new.shape[1:])), dim=1).transpose(1, 2)
            for old, new in zip(context, block, strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(query.shape)


def _snapshot(model: DFlashDraftModel, head: Tensor) -> DFlashDraftModel:
    """A copy beside ``head`` with matrices in its type, cast once; norms stay float32."""
    with torch.device("meta"):
        twin = DFlashDraftModel(model.options, model.shape, model.seed, model.variant)
    state = {
        name: t.detach().to(head.device, head.dtype if t.dim() > 1 else t.dtype, copy=True)
        for name, t in model.state_dict().items()
    }
    twin.load_state_dict(state, assign=True)
    return twin.requires_grad_(False)
