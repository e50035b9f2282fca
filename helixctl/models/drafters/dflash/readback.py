"""A second, plain implementation of the drafter that knows nothing but an exported config.json and its tensors.

It shares no code with ``model.py`` or ``policy.py``: float32, one block at a time, taps concatenated, one full matrix
of scores. An export is compared with it before it is called done, and it is the slow reference in tests. It reads
z-lab's keys; configurations of other formats are flattened into them first.

Legend: T context tokens, B block size, K taps, H width, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from helixctl.models.drafters.dflash.formats import zlab
from helixctl.models.drafters.dflash.model import DFlashDraftModel
from helixctl.models.drafters.dflash.policy import DFlashPolicy
from helixctl.models.drafters.dflash.published import Published
from helixctl.models.facts import TargetFacts
from helixctl.models.shared import SharedWeights

CONTEXT_TOKENS = 48
NUM_CLASSES = 1024
"""Rows of the random head: enough to see every direction of a state, small for any vocabulary."""


@dataclass(frozen=True)
class Difference:
    """How far two computations of the same logits are apart."""

    max_abs: float
    scale: float
    """Largest absolute logit."""


def largest_difference(
    model: nn.Module, facts: TargetFacts, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Difference:
    """Compare the block logits of ``model`` with those of the exported files, for a random context, in float32.

    Args:
        model: The drafter, on the CPU, in float32, its weights rounded to the exported type.
        facts: Of the target.
        config: Read from the exported config.json.
        tensors: Read from the exported model.safetensors.
    """
    assert isinstance(model, DFlashDraftModel)
    probe = make_probe(config, facts.vocab_size)
    shared = SharedWeights(probe.embedding, probe.head, None, facts.embedding_scale, facts.logit_softcap, nn.Identity())
    policy = DFlashPolicy(model, shared)
    return difference(policy.draft_logits(*begin(policy, probe))[0], _probe_logits(config, tensors, probe))


def published_difference(
    source: tuple[Published, Mapping[str, Tensor]], written: tuple[Mapping[str, Any], Mapping[str, Tensor]]
) -> Difference:
    """Compare a published drafter with what was written of it (a flat config.json); 0.0 where they are the same."""
    return compare_published(source, written, _probe_logits)


@dataclass(frozen=True)
class Probe:
    """A random context and the target's tables, for any drafter of these sizes."""

    features: list[Tensor]  # K x [T, H]
    embedding: Tensor  # [V, H]
    head: Tensor  # [V', H]
    anchor_id: int


def compare_published(
    source: tuple[Published, Mapping[str, Tensor]],
    written: tuple[Mapping[str, Any], Mapping[str, Tensor]],
    compute: Callable[[Mapping[str, Any], Mapping[str, Tensor], Probe], Tensor],
) -> Difference:
    """As ``published_difference``, by what an algorithm has to ``compute`` of configuration, tensors and a probe."""
    drafter, tensors = source
    config = zlab.write(replace(drafter, num_target_layers=0))  # which it does not compute with
    probe = make_probe(config, drafter.vocab_size)
    return difference(compute(config, tensors, probe), compute(*written, probe))


def make_probe(config: Mapping[str, Any], vocab_size: int) -> Probe:
    """A probe for a drafter with this flat configuration."""
    generator = torch.Generator().manual_seed(0)
    width, section = int(config["hidden_size"]), config["dflash_config"]
    num_taps, mask_id = len(section["target_layer_ids"]), int(section["mask_token_id"])
    anchor_id = 0 if mask_id else 1
    scales = 10.0 ** torch.arange(num_taps).remainder(3)  # taps of a real target differ in scale
    features = [torch.randn(CONTEXT_TOKENS, width, generator=generator) * scale for scale in scales]
    embedding = torch.zeros(vocab_size, width)  # untouched rows take no memory
    embedding[[anchor_id, mask_id]] = torch.randn(2, width, generator=generator)
    head = torch.randn(min(NUM_CLASSES, vocab_size), width, generator=generator)
    return Probe(features, embedding, head, anchor_id)


def _probe_logits(config: Mapping[str, Any], tensors: Mapping[str, Tensor], probe: Probe) -> Tensor:
    section = config["dflash_config"]
    ids = [probe.anchor_id] + [int(section["mask_token_id"])] * (int(section["block_size"]) - 1)
    return block_logits(config, tensors, torch.cat(probe.features, dim=-1), probe.embedding[ids], probe.head)


def begin(policy: DFlashPolicy, probe: Probe) -> tuple[Tensor, Tensor]:
    """Give ``policy`` the probe's context, as decoding does: the anchor behind it, [1], and where that stands, [1]."""
    length = len(probe.features[0])
    policy.start(1, length)
    valid = torch.ones(1, length, dtype=torch.bool)
    policy.extend([tap[None] for tap in probe.features], torch.arange(length)[None], valid)
    return torch.tensor([probe.anchor_id]), torch.tensor([length])


def difference(one: Tensor, other: Tensor) -> Difference:
    """How far ``one`` is from ``other``, of the same shape."""
    return Difference(float((one - other).abs().max()), float(other.abs().max()))


def block_logits(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], features: Tensor, block: Tensor, head: Tensor
) -> Tensor:
    """Logits [B-1, V] of the drafted slots of a block whose anchor stands right behind the context.

    Args:
        config: An exported config.json.
        tensors: The tensors beside it, any floating type.
        features: [T, K*H] taps of the context tokens, concatenated in the order of ``target_layer_ids``.
        block: [B, H] raw embeddings of the anchor and the mask tokens.
        head: [V, H] of the target.
    """
    logits = block_states(config, tensors, features, block)[1:] @ head.float().T
    softcap = config["dflash_config"].get("final_logit_softcapping")
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def block_states(config: Mapping[str, Any], tensors: Mapping[str, Tensor], features: Tensor, block: Tensor) -> Tensor:
    """Normed states [B, H] of all slots; arguments as for ``block_logits``."""
    weights = {name: tensor.float() for name, tensor in tensors.items()}
    eps, section = float(config["rms_norm_eps"]), config["dflash_config"]
    context = _norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    angles = _angles(config, len(context) + len(block))
    h = block * float(section.get("input_embedding_scale", 1.0))
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        h = h + _attend(config, own, context, _norm(h, own["input_layernorm.weight"], eps), angles)
        x = _norm(h, own["post_attention_layernorm.weight"], eps)
        gate, up = x @ own["mlp.gate_proj.weight"].T, x @ own["mlp.up_proj.weight"].T
        h = h + (gate * torch.sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T
    return _norm(h, weights["norm.weight"], eps)


def _attend(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], context: Tensor, x: Tensor, angles: Tensor
) -> Tensor:
    """Attention of the block [B, H] over context and block; a causal block's slots do not see later ones."""
    dim, eps = int(config["head_dim"]), float(config["rms_norm_eps"])
    both = torch.cat((context, x))  # [T+B, H]
    q = (x @ weights["self_attn.q_proj.weight"].T).view(len(x), -1, dim)
    k = (both @ weights["self_attn.k_proj.weight"].T).view(len(both), -1, dim)
    v = (both @ weights["self_attn.v_proj.weight"].T).view(len(both), -1, dim)
    q = _turn(_norm(q, weights["self_attn.q_norm.weight"], eps), angles[-len(x) :])
    k = _turn(_norm(k, weights["self_attn.k_norm.weight"], eps), angles)
    repeat = int(config["num_attention_heads"]) // int(config["num_key_value_heads"])
    k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))  # [T+B, heads, D]
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    if config["dflash_config"].get("causal"):
        later = torch.arange(len(both)) > torch.arange(len(context), len(both))[:, None]
        scores = scores.masked_fill(later, float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v).flatten(1)  # [B, heads*D]
    return mixed @ weights["self_attn.o_proj.weight"].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _angles(config: Mapping[str, Any], length: int) -> Tensor:
    """Rotation angles [length, 1, D/2], from position 0."""
    dim = int(config["head_dim"])
    frequencies = float(config["rope_parameters"]["rope_theta"]) ** (-torch.arange(0, dim, 2) / dim)
    return (torch.arange(length)[:, None] * frequencies)[:, None]


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of [n, heads, D]: dimension i goes with i + D/2."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
