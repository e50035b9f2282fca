"""The DFlash drafter: a few non-causal decoder layers over one block, with target features as extra keys and values.

Weights are float32 masters with the tensor names of the published checkpoints; the caller chooses the compute type
with ``torch.autocast``. The embedding and the head are the target's and are passed in.

Other algorithms are this one with a ``Variant``: causal blocks, shifted labels, another objective, further parts.

Legend: R rows, S tokens per row, A anchors per row, n computed blocks, W slots per block, N = n * W queries, K taps,
H width, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from helixctl.models.drafters._noise import add_noise
from helixctl.models.drafters._objective import Drafted, train_terms, validation_sums
from helixctl.models.drafters._options import BlockOptions
from helixctl.models.drafters._sizes import Shape
from helixctl.models.drafters._terms import LossTerms
from helixctl.models.private import compiled_here, is_interpreted
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


@dataclass(frozen=True)
class Variant:
    """What sets an algorithm apart from plain DFlash."""

    causal: bool = False
    """A slot sees itself and the slots before it, instead of the whole block."""
    shift: int = 0
    """0: slot k predicts the token in its own place, the anchor's slot nothing. 1: every slot predicts the next token,
    so there is a slot less."""
    train: Callable[[Drafted, DFlashDraftModel], LossTerms] | None = None
    """Loss of a training micro-batch; None: the terms of ``options.loss``."""
    evaluate: Callable[[Drafted, DFlashDraftModel], dict[str, Tensor]] | None = None
    """Sums of a validation micro-batch; None: those of the terms of ``options.loss``."""
    parts: Mapping[str, Callable[[Shape], nn.Module]] = field(default_factory=dict)
    """Further modules by name, and how they are built."""


PLAIN = Variant()


class DFlashDraftModel(nn.Module):
    """See the module's docstring. Built by ``plugin.build``, which also sets the initial weights."""

    compiles = False
    """Whether training and validation compile the layers, each thread for itself. Decoding never does."""

    def __init__(self, options: BlockOptions, shape: Shape, seed: int, variant: Variant = PLAIN) -> None:
        super().__init__()
        self.options, self.shape, self.seed, self.variant = options, shape, seed, variant
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, make in variant.parts.items():
            self.add_module(name, make(shape))

    @property
    def num_slots(self) -> int:
        """W; a block drafts ``block_size`` - 1 tokens, whichever slots predict them."""
        return self.options.block_size - self.variant.shift

    def forward(self, slot: SlotBatch, shared: SharedWeights) -> Tensor:
        """Final-normed block states [R, A, W, H]; zeros for invalid blocks that the backend leaves out."""
        blocks = self._blocks(slot)
        hidden, index = self._states(slot.features, slot, blocks, shared)
        shape = (*blocks.ids.shape, hidden.shape[-1])
        if index is None:
            return hidden.view(shape)
        return hidden.new_zeros(shape).flatten(0, 1).index_copy(0, index, hidden).view(shape)

    def drafted_states(self, slot: SlotBatch, shared: SharedWeights) -> Tensor:
        """The states that the head reads: [R, A, ``block_size`` - 1, H]."""
        out: Tensor = self(slot, shared)[:, :, 1 - self.variant.shift :]
        return out

    @property
    def capturable(self) -> bool:
        """Whether ``loss`` queues the same work for every micro-batch, so that a CUDA graph can hold it."""
        # Sampled classes are drawn on the host, and groups of anchors are made there.
        return self.options.loss.sampled_classes is None and self.options.attention != "groups"

    def loss(self, slot: SlotBatch, shared: SharedWeights) -> LossTerms:
        """Loss and additive metrics of a training micro-batch; the caller divides over the whole step."""
        features = add_noise(slot.features, self.options.feature_noise, self.seed, slot.number, slot.first_row)
        drafted = self._drafted(features, slot, shared)
        own = self.variant.train
        return train_terms(drafted, self.options.loss) if own is None else own(drafted, self)

    @torch.no_grad()
    def evaluate(self, slot: SlotBatch, shared: SharedWeights) -> dict[str, Tensor]:
        """Additive validation metrics: loss_num, loss_den, term_*, correct_k, count_k, prefix_sum, num_blocks."""
        drafted = self._drafted(slot.features, slot, shared)
        own = self.variant.evaluate
        return validation_sums(drafted, self.options.loss) if own is None else own(drafted, self)

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
        return make_blocks(slot, self.num_slots, self.options.mask_token_id, self.variant.shift)

    def _drafted(self, features: Sequence[Tensor], slot: SlotBatch, shared: SharedWeights) -> Drafted:
        blocks = self._blocks(slot)
        hidden, index = self._states(features, slot, blocks, shared)
        seq = 0 if slot.batch is None else slot.batch.seq
        return Drafted(hidden, index, blocks, slot, shared, _mix(self.seed, seq))

    def _states(
        self, features: Sequence[Tensor], slot: SlotBatch, blocks: Blocks, shared: SharedWeights
    ) -> tuple[Tensor, Tensor | None]:
        """Final-normed states [n, W, H] of the computed blocks, and their flat places (None: all R * A)."""
        attention = self._attention(slot, blocks)
        ids, positions = blocks.ids.flatten(0, 1), blocks.positions.flatten(0, 1)  # [R * A, W]
        if attention.index is not None:
            ids, positions = ids[attention.index], positions[attention.index]
        project, run = self._maybe_compiled(_project), self._maybe_compiled(_run_layer)
        context = _Context(project(self, features), self.rotary(slot.position_ids))
        h, rotary = self.embed(ids.flatten(), shared), self.rotary(positions.flatten())
        for layer in self.layers:
            h = run(layer, h, rotary, context, attention)
        h = _normed(self.norm, h, h.dtype)
        return h.view(*ids.shape, h.shape[-1]), attention.index

    def _maybe_compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self.compiles or self.options.attention == "groups" or torch.compiler.is_dynamo_compiling():
            return function
        return compiled_here(function)

    def _attention(self, slot: SlotBatch, blocks: Blocks) -> BlockAttention:
        on_cpu = blocks.ids.device.type == "cpu"
        backend, causal = self.options.attention, self.variant.causal
        if backend == "auto" and on_cpu:
            backend = "dense" if self.compiles else "groups"  # groups have other shapes in every micro-batch
        elif backend == "auto" and is_interpreted():
            backend = "dense"  # interpreted flex_attention keeps all scores as well, and warns
        if backend == "groups":
            return make_group_attention(blocks, causal=causal)
        if backend == "dense":
            return make_dense_attention(blocks, slot.document_ids, causal=causal)
        return make_flex_attention(blocks, slot.input_ids.shape[1], causal=causal)

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]


class _Context(NamedTuple):
    states: Tensor  # [R, S, H], projected and normed features
    rotary: Rotary


def _run_layer(layer: DraftLayer, h: Tensor, rotary: Rotary, context: _Context, attention: BlockAttention) -> Tensor:
    """One layer with the keys and values of its context: all layers share what is compiled of it."""
    out: Tensor = layer(h, rotary, layer.self_attn.key_value(context.states, context.rotary), attention)
    return out


def _project(model: DFlashDraftModel, features: Sequence[Tensor]) -> Tensor:
    return model.project_features(features)


def _normed(norm: RMSNorm, x: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = norm(x)
    return out.to(dtype)


def _mix(seed: int, seq: int) -> int:
    """One seed from two numbers; far-apart results for neighbouring micro-batches."""
    return (seed * 0x9E3779B97F4A7C15 + seq * 0xBF58476D1CE4E5B9 + 1) % 2**63
