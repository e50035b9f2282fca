"""The DFlash drafter: a few non-causal decoder layers over one block, with target features as extra keys and values.

Weights are float32 masters with the tensor names of the published checkpoints; the caller chooses the compute type
with ``torch.autocast``. The embedding and the head are the target's and are passed in.

Legend: R rows, S tokens per row, A anchors per row, n computed blocks, B block size, N = n * B queries, K taps,
H width, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helixctl.data.batch import SlotBatch
from helixctl.models.drafters._attention import (
    BlockAttention,
    KeyValue,
    make_dense_attention,
    make_flex_attention,
)
from helixctl.models.drafters._blocks import Blocks, make_blocks
from helixctl.models.drafters._group_attention import make_group_attention
from helixctl.models.drafters._layers import GatedMlp, RMSNorm, Rotary, compute_dtype, rotary_tables, rotate
from helixctl.models.drafters._terms import LossTerms
from helixctl.models.drafters.dflash.objective import train_terms, validation_sums
from helixctl.models.drafters.dflash.options import Options, Shape
from helixctl.models.shared import SharedWeights


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block, through the same weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_value, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_value, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.head_dim = shape.head_dim

    def key_value(self, x: Tensor, rotary: Rotary) -> KeyValue:
        """Keys (normed, rotated) and values of ``x`` [..., H]: [..., kv heads, D] each."""
        keys = self._heads(self.k_proj(x))
        return rotate(self.k_norm(keys), rotary).to(keys.dtype), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, rotary: Rotary, context: KeyValue, attention: BlockAttention) -> Tensor:
        """Block states [N, H] to [N, H]."""
        query = self._heads(self.q_proj(x))
        query = rotate(self.q_norm(query), rotary).to(query.dtype)
        attended = attention(query, context, self.key_value(x, rotary))  # [N, heads, D]
        out: Tensor = self.o_proj(attended.flatten(-2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP. The context is not normed again: ``hidden_norm`` has done it once."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape)
        self.mlp = GatedMlp(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, h: Tensor, rotary: Rotary, context: KeyValue, attention: BlockAttention) -> Tensor:
        """Block states [N, H] to [N, H]."""
        h = h + self.self_attn(_normed(self.input_layernorm, h, h.dtype), rotary, context, attention)
        out: Tensor = h + self.mlp(_normed(self.post_attention_layernorm, h, h.dtype))
        return out


class DFlashDraftModel(nn.Module):
    """See the module's docstring. Built by ``plugin.build``, which also sets the initial weights."""

    def __init__(self, options: Options, shape: Shape, seed: int) -> None:
        super().__init__()
        self.options, self.shape, self.seed = options, shape, seed
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, slot: SlotBatch, shared: SharedWeights) -> Tensor:
        """Final-normed block states [R, A, B, H]; zeros for invalid blocks that the backend leaves out."""
        blocks = self._blocks(slot)
        hidden, index = self._states(slot, blocks, shared)
        shape = (*blocks.ids.shape, hidden.shape[-1])
        if index is None:
            return hidden.view(shape)
        return hidden.new_zeros(shape).flatten(0, 1).index_copy(0, index, hidden).view(shape)

    def loss(self, slot: SlotBatch, shared: SharedWeights) -> LossTerms:
        """Loss and additive metrics of a training micro-batch; the caller divides over the whole step."""
        blocks = self._blocks(slot)
        hidden, index = self._states(slot, blocks, shared)
        seq = 0 if slot.batch is None else slot.batch.seq
        return train_terms(hidden, index, blocks, shared, self.options.loss, _mix(self.seed, seq))

    @torch.no_grad()
    def evaluate(self, slot: SlotBatch, shared: SharedWeights) -> dict[str, Tensor]:
        """Additive validation metrics: loss_num, loss_den, correct_k, count_k, prefix_sum, num_blocks."""
        blocks = self._blocks(slot)
        hidden, index = self._states(slot, blocks, shared)
        return validation_sums(hidden, index, blocks, shared, self.options.loss)

    def project_features(self, features: Sequence[Tensor]) -> Tensor:
        """K taps [..., H] to the normed context [..., H] in the compute type.

        The product with the concatenated taps is taken as a sum of K products. Their results are added in float32:
        taps differ in scale by a factor of 30 and hold single values of 25,000, so a running bfloat16 sum would lose
        the small taps.
        """
        dtype = compute_dtype(self.fc.weight)
        slices = self.fc.weight.to(dtype).unflatten(1, (len(features), -1)).unbind(1)  # K x [H, H]
        total = F.linear(features[0].to(dtype), slices[0]).float()
        for feature, weight in zip(features[1:], slices[1:], strict=True):
            total = total + F.linear(feature.to(dtype), weight).float()
        return _normed(self.hidden_norm, total, dtype)

    def embed(self, ids: Tensor, shared: SharedWeights) -> Tensor:
        """Embeddings [..., H] in the compute type, scaled unless the options want them raw."""
        scaled = self.options.scale_embeddings
        rows = shared.embed(ids) if scaled else F.embedding(ids, shared.embedding)
        return rows.to(compute_dtype(self.fc.weight))

    def rotary(self, positions: Tensor) -> Rotary:
        """Tables for ``positions``."""
        return rotary_tables(positions, self.shape.head_dim, self.shape.rope_theta)

    def run_layers(self, h: Tensor, rotary: Rotary, contexts: Sequence[KeyValue], attention: BlockAttention) -> Tensor:
        """Embedded slots [N, H] through all layers and the final norm; ``contexts`` has one entry per layer."""
        for layer, context in zip(self.layers, contexts, strict=True):
            h = layer(h, rotary, context, attention)
        return _normed(self.norm, h, h.dtype)

    def context_key_values(self, context: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of the context [..., H] at ``positions`` [...], one pair per layer."""
        rotary = self.rotary(positions)
        return [layer.self_attn.key_value(context, rotary) for layer in self._layers()]

    def _blocks(self, slot: SlotBatch) -> Blocks:
        return make_blocks(slot, self.options.block_size, self.options.mask_token_id)

    def _states(self, slot: SlotBatch, blocks: Blocks, shared: SharedWeights) -> tuple[Tensor, Tensor | None]:
        """Final-normed states [n, B, H] of the computed blocks, and their flat places (None: all R * A)."""
        attention = self._attention(slot, blocks)
        ids, positions = blocks.ids.flatten(0, 1), blocks.positions.flatten(0, 1)  # [R * A, B]
        if attention.index is not None:
            ids, positions = ids[attention.index], positions[attention.index]
        contexts = self.context_key_values(self.project_features(slot.features), slot.position_ids)
        h = self.embed(ids.flatten(), shared)
        h = self.run_layers(h, self.rotary(positions.flatten()), contexts, attention)
        return h.view(*ids.shape, h.shape[-1]), attention.index

    def _attention(self, slot: SlotBatch, blocks: Blocks) -> BlockAttention:
        on_cpu = blocks.ids.device.type == "cpu"
        backend = self.options.attention
        if backend == "groups" or (backend == "auto" and on_cpu):
            return make_group_attention(blocks)
        if backend == "dense":
            return make_dense_attention(blocks, slot.document_ids)
        return make_flex_attention(blocks, slot.input_ids.shape[1])

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]


def _normed(norm: RMSNorm, x: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = norm(x)
    return out.to(dtype)


def _mix(seed: int, seq: int) -> int:
    """One seed from two numbers; far-apart results for neighbouring micro-batches."""
    return (seed * 0x9E3779B97F4A7C15 + seq * 0xBF58476D1CE4E5B9 + 1) % 2**63
