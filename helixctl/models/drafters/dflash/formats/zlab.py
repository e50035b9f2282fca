"""The format of the authors' own checkpoints, read by z-lab's code, vLLM, SGLang, and written by SpecForge too.

A flat Qwen3 configuration with a section ``dflash_config``. Keys that consumers look for in two places are written in
both; reading takes the section first, as they do. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helixctl.errors import CheckpointError
from helixctl.models.drafters.dflash.published import Published

SECTION = "dflash_config"
ENGINES = ("vLLM", "SGLang")
"""Serving engines that load it."""
_OTHER_ALGORITHMS = ("conv_kernel_size", "selector_rank", "projector_type", "attention_sink_bias", "use_swa")
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
)


def matches(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this format, and of blocks that see both ways."""
    return SECTION in config and "speculators_model_type" not in config and not is_causal(config)


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in this format: itself."""
    return dict(config)


def read(config: Mapping[str, Any], *, causal: bool = False) -> Published:
    """What the configuration says.

    Args:
        config: The content of config.json.
        causal: Whether its blocks have to be.

    Raises:
        CheckpointError: keys are missing, or it describes a drafter that helixctl cannot compute; names all of them.
    """
    wrong = [f"{key} is missing" for key in NEEDED if config.get(key) is None]
    wrong += [f"{key} is missing" for key in ("block_size", "mask_token_id") if value(config, key) is None]
    wrong += ["rope_theta is missing"] if rope(config).get("rope_theta") is None else []
    wrong += ["target_layer_ids and num_target_layers are missing"] if taps_of(config) is None else []
    wrong += unsupported(config)
    if is_causal(config) != causal:
        wrong.append("its blocks are not causal" if causal else "its blocks are causal")
    if wrong:
        raise CheckpointError(f"this drafter cannot be used: {'; '.join(wrong)}", fix="see `helixctl export --check`")
    heads = int(config["num_attention_heads"])
    return Published(
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=int(config["hidden_size"]),
        num_heads=heads,
        num_kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        rope_theta=float(rope(config)["rope_theta"]),
        rms_norm_eps=float(config["rms_norm_eps"]),
        block_size=int(value(config, "block_size")),
        mask_token_id=int(value(config, "mask_token_id")),
        taps=taps_of(config) or (),
        num_target_layers=value(config, "num_target_layers"),
        max_positions=int(config.get("max_position_embeddings") or 0),
        embedding_scale=float(value(config, "input_embedding_scale") or 1.0),
        logit_softcap=value(config, "final_logit_softcapping") or None,
        bos_token_id=_first(config.get("bos_token_id")),
        eos_token_id=_first(config.get("eos_token_id")),
        pad_token_id=_first(config.get("pad_token_id")),
        causal=is_causal(config),
    )


def write(drafter: Published) -> dict[str, Any]:
    """``config.json`` with every key that z-lab's code, vLLM and SGLang read.

    Raises:
        CheckpointError: it is not known how many layers the target has.
    """
    if drafter.num_target_layers is None:
        raise CheckpointError("the format needs the number of the target's layers", fix="give --target MODEL")
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": drafter.block_size,
        SECTION: _section(drafter),
        "num_target_layers": drafter.num_target_layers,
        **decoder_keys(drafter),
        "is_causal": drafter.causal,
        "tie_word_embeddings": False,
    }


def decoder_keys(drafter: Published) -> dict[str, Any]:
    """The layers, as a Qwen3 configuration; both schemas of rotary positions (older stacks read the first two keys)."""
    return {
        "vocab_size": drafter.vocab_size,
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": drafter.num_layers,
        "num_attention_heads": drafter.num_heads,
        "num_key_value_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": drafter.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * drafter.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": drafter.num_layers,
        "max_position_embeddings": drafter.max_positions,
        "rope_theta": drafter.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": drafter.rope_theta},
        "use_cache": True,
        "bos_token_id": drafter.bos_token_id,
        "eos_token_id": drafter.eos_token_id,
        "pad_token_id": drafter.pad_token_id,
    }


def value(config: Mapping[str, Any], key: str) -> Any:
    """A key of the section, else of the top, as consumers look for it."""
    section = config.get(SECTION) or {}
    found = section.get(key)
    return config.get(key) if found is None else found


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions in the newer schema, whichever is written."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if config.get("rope_theta") is not None:
        parameters.setdefault("rope_theta", config["rope_theta"])
    return parameters


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether slots of a block do not see later ones."""
    return bool(value(config, "causal") or config.get("is_causal"))


def taps_of(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The tapped layers, by the authors' formula where they are not written; None where neither is known."""
    ids = value(config, "target_layer_ids")
    if ids is not None:
        return tuple(int(i) for i in ids)
    layers, own = value(config, "num_target_layers"), config.get("num_hidden_layers")
    return formula(int(layers), int(own)) if layers and own else None


def formula(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The authors' choice where a configuration names no layers: an even spread, halves rounded to even."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers))


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """What helixctl's drafter does not compute."""
    kind = rope(config).get("rope_type") or rope(config).get("type") or "default"
    activation = config.get("hidden_act") or "silu"
    reduced = config.get("draft_vocab_size") or config.get("vocab_size")
    found = {
        "it has sliding windows": "sliding_attention" in (config.get("layer_types") or ()),
        f"its rotary positions are scaled ({kind})": kind != "default",
        "its projections have biases": config.get("attention_bias"),
        f"hidden_act is {activation}": activation != "silu",
        "its rotary positions are interleaved": config.get("is_neox_style") is False,
        f"it drafts from a reduced vocabulary of {reduced}": reduced != config.get("vocab_size"),
        "its logits are scaled": float(value(config, "output_multiplier") or 1.0) != 1.0,
        **{f"{key} is {value(config, key)!r}": value(config, key) for key in _OTHER_ALGORITHMS},
    }
    return [what for what, holds in found.items() if holds]


def _section(drafter: Published) -> dict[str, Any]:
    section: dict[str, Any] = {
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.taps),
        "causal": drafter.causal,
    }
    if drafter.embedding_scale != 1.0:
        section["input_embedding_scale"] = drafter.embedding_scale
    if drafter.logit_softcap is not None:
        section["final_logit_softcapping"] = drafter.logit_softcap
    return section


def _first(ids: Any) -> int | None:
    return (ids[0] if ids else None) if isinstance(ids, list) else ids
