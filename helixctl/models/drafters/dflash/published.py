"""A published drafter in our words: what every format says, each in its own keys. Never imports torch.

Formats translate from and to it (``formats/``), so that converting is reading one and writing another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helixctl.models.drafters._options import BlockOptions
from helixctl.models.drafters._sizes import make_shape
from helixctl.models.drafters.dflash.options import Options
from helixctl.models.facts import TargetFacts

_RENAMED = {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."}
"""TorchSpec's names of the same parts."""
_TARGETS_OWN = ("embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head.", "rotary_emb.")
"""Tensors that some trainers store too although they are the target's, or follow from the configuration."""


@dataclass(frozen=True)
class Published:
    """Everything that an engine must know of a drafter, beside its tensors."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    block_size: int
    """Tokens per block, the anchor included."""
    mask_token_id: int
    taps: tuple[int, ...]
    """0-based target layers whose output is captured."""
    num_target_layers: int | None
    """None where the format does not say it."""
    max_positions: int
    """Longest context that the target is served with."""
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    target: str | None = None
    """Hub name or folder of the target."""
    target_architectures: tuple[str, ...] = ()
    causal: bool = False
    """Slots of a block do not see later ones."""
    markov_rank: int | None = None
    """Of a head that adds to the logits by the token before; None: there is none."""


DEFAULT_FORMAT = "zlab"
"""What ``export`` writes unless told otherwise."""
SIZES = (
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "rope_theta",
    "rms_norm_eps",
    "taps",
    "embedding_scale",
)
"""What has to agree between a published drafter and a recipe."""
OPTION_OF = {"taps": "target_layer_ids", "embedding_scale": "scale_embeddings"}
"""Options that are called otherwise than the field that they decide."""


def describe(options: BlockOptions, facts: TargetFacts, taps: Sequence[int], target: str | None) -> Published:
    """The drafter that ``options`` make for a target.

    Raises:
        ModelError: sizes that do not fit together.
    """
    shape = make_shape(options, facts, len(taps))
    return Published(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        rope_theta=shape.rope_theta,
        rms_norm_eps=shape.rms_norm_eps,
        block_size=options.block_size,
        mask_token_id=options.mask_token_id,
        taps=tuple(taps),
        num_target_layers=facts.num_layers,
        max_positions=served_positions(facts),
        embedding_scale=facts.embedding_scale if options.scale_embeddings else 1.0,
        logit_softcap=facts.logit_softcap,
        bos_token_id=next(iter(facts.bos_token_ids), None),
        eos_token_id=next(iter(facts.eos_token_ids), None),
        pad_token_id=next(iter(facts.pad_token_ids), None),
        target=target,
        target_architectures=facts.architectures,
    )


def unsaid(drafter: Published) -> str | None:
    """What its target needs that only z-lab's keys can say; None where it needs nothing of the kind."""
    needs = [f"scales its embeddings by {drafter.embedding_scale:.4g}"] if drafter.embedding_scale != 1.0 else []
    needs += [f"caps its logits at {drafter.logit_softcap:g}"] if drafter.logit_softcap is not None else []
    return " and ".join(needs) or None


def options_of(drafter: Published) -> Options:
    """The recipe's ``drafter`` section that builds it, every size written out."""
    return Options.model_validate(option_values(drafter))


def option_values(drafter: Published) -> dict[str, Any]:
    """The same for the options of any algorithm with these layers."""
    return {
        "num_layers": drafter.num_layers,
        "target_layer_ids": drafter.taps,
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "num_heads": drafter.num_heads,
        "num_kv_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "intermediate_size": drafter.intermediate_size,
        "rope_theta": drafter.rope_theta,
        "rms_norm_eps": drafter.rms_norm_eps,
        "scale_embeddings": drafter.embedding_scale != 1.0,
    }


def served_positions(facts: TargetFacts) -> int:
    """Positions that engines serve the target with: stretched rotary positions (YaRN and the like) count.

    vLLM takes ``original_max_position_embeddings`` times the factor; a drafter that says less stops drafting there.
    """
    config = facts.raw.get("text_config") or facts.raw
    longest = facts.max_positions
    for place in ("rope_scaling", "rope_parameters"):
        scaling = config.get(place) or {}
        scaling = scaling.get("full_attention", scaling)
        original = scaling.get("original_max_position_embeddings") or 0
        longest = max(longest, int(original * float(scaling.get("factor") or 1.0)))
    return longest


def own_tensor_name(name: str) -> str | None:
    """Our name of a published tensor; None for one that belongs to the target."""
    name = name.removeprefix("draft_model.").removeprefix("model.")
    for other, ours in _RENAMED.items():
        if name.startswith(other):
            return ours + name.removeprefix(other)
    return None if name.startswith(_TARGETS_OWN) or ".rotary_emb." in name else name


def tensor_shapes(sizes: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a drafter with these sizes (a ``Published``)."""
    width, dim, inner = sizes.hidden_size, sizes.head_dim, sizes.intermediate_size
    query, key_value = sizes.num_heads * dim, sizes.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(sizes.taps) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (query, width),
        "self_attn.k_proj": (key_value, width),
        "self_attn.v_proj": (key_value, width),
        "self_attn.o_proj": (width, query),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    for i in range(sizes.num_layers):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
