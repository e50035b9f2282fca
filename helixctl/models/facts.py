"""What a target's config.json says, in our words. Never imports torch or transformers.

Configurations of multimodal models nest the language model's values in `text_config`; those are the ones read.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from helixctl.errors import ModelError
from helixctl.recipe.causal_lm import ModelOptions
from helixctl.recipe.schema import TargetOptions

_log = logging.getLogger(__name__)

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_RECURRENT_TYPES = ("mamba", "rwkv", "jamba", "recurrent_gemma", "zamba", "bamba", "falcon_h1", "lfm2", "nemotron_h")
_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "ssm")
_FIX = "download the model, set target.model to its folder, or give `plan --target-config FILE`"
_TIED_TYPES = (
    *("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4"),
    *("gpt2", "gpt_bigcode", "gpt_neo", "lfm2", "lfm2_moe", "opt", "recurrent_gemma", "smollm3", "starcoder2"),
)
"""Whose head is the embedding unless config.json says otherwise: files leave out what is their class's default."""
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {  # the published Gemma 3 4B leaves all of these out
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    }
}
_SCALED_LOGITS = ("logits_scaling", "logit_scale")
_OLD_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
"""What GPT-2 and its relatives call them."""
_OLD_NAMES |= {"max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}


@dataclass(frozen=True)
class TargetFacts:
    """Sizes and constants of the target."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding; at least the tokenizer's length."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool
    """The head is the embedding."""
    model_type: str
    max_positions: int
    rope_theta: float
    rms_norm_eps: float
    recurrent: bool
    """Some layers carry a state along the row: documents cannot share one."""
    embedding_scale: float
    """Embeddings are multiplied by this before the first layer."""
    logit_softcap: float | None
    """Logits become cap x tanh(logits / cap)."""
    architectures: tuple[str, ...]
    dtype: str
    """Of the stored weights: bfloat16, float16 or float32."""
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer: those of generation_config.json too, where it exists."""
    pad_token_ids: tuple[int, ...]
    num_experts: int = 0
    """0 without mixture-of-experts layers."""
    expert_intermediate_size: int = 0
    raw: dict[str, Any] = field(default_factory=dict, repr=False, hash=False, compare=False)
    """The whole config.json."""


def read_target_facts(options: TargetOptions) -> TargetFacts:
    """Facts of the target: from `target.config` if given, else the model's folder, else the hub (or its cache).

    Raises:
        ModelError: no config.json, not one of a decoder, or two that differ.
    """
    local = Path(options.model) / "config.json"
    if options.config is None:
        found = find_model_file(options.model, "config.json")
        if found is None:
            raise ModelError(f"{options.model} has no config.json", fix="name a checkpoint in Hugging Face format")
        return _read_facts(found)
    facts = _read_facts(options.config)
    if local.is_file() and _read_facts(local) != facts:
        raise ModelError(
            f"target.config {options.config} is not the configuration of {options.model}",
            fix="take target.config away; it is for models that are not on this machine",
        )
    return facts


def read_model_facts(options: ModelOptions) -> TargetFacts:
    """Facts of a model to be trained: from its configuration, or from the checkpoint that it begins with.

    Raises:
        ModelError: no configuration, or not one of a decoder.
    """
    if options.checkpoint is not None:
        return read_target_facts(TargetOptions(model=options.checkpoint))
    if isinstance(options.config, dict):
        return _facts_of(options.config, {}, "model.config")
    assert options.config is not None, "load.py checks that there is a config or a checkpoint"
    return _read_facts(options.config / "config.json" if options.config.is_dir() else options.config)


def target_parameters(facts: TargetFacts) -> int:
    """Weights of the whole target, norms and biases left out."""
    return table_parameters(facts) + facts.num_layers * layer_parameters(facts)


def table_parameters(facts: TargetFacts) -> int:
    """Weights of embedding and head."""
    return facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)


def layer_parameters(facts: TargetFacts) -> int:
    """Weights of one layer's matrices."""
    attention = facts.hidden_size * facts.head_dim * (2 * facts.num_heads + 2 * facts.num_kv_heads)
    if facts.num_experts:
        return attention + 3 * facts.hidden_size * facts.expert_intermediate_size * facts.num_experts
    return attention + 3 * facts.hidden_size * (facts.intermediate_size or 4 * facts.hidden_size)


def layer_outputs(facts: TargetFacts) -> int:
    """Rows of all matrices of one layer without experts."""
    attention = facts.head_dim * (facts.num_heads + 2 * facts.num_kv_heads) + facts.hidden_size
    return attention + 2 * (facts.intermediate_size or 4 * facts.hidden_size) + facts.hidden_size


def _read_facts(path: Path) -> TargetFacts:
    generation = path.with_name("generation_config.json")
    return _facts_of(_read_json(path), _read_json(generation) if generation.is_file() else {}, path)


def _facts_of(raw: dict[str, Any], generation: dict[str, Any], path: Path | str) -> TargetFacts:
    config = raw.get("text_config") or raw.get("llm_config") or raw
    if not isinstance(config, dict):
        raise ModelError(f"{path}: text_config is not a section", fix="name a model with a decoder")
    config = {**{name: config[old] for name, old in _OLD_NAMES.items() if config.get(old)}, **config}
    for name in _SCALED_LOGITS:
        if config.get(name, 1) not in (1, None):
            message = f"{path}: {name} is {config[name]}; scaled logits are not supported"
            raise ModelError(message, fix="use another target")
    try:
        return _facts(raw, config, generation)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        missing = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path} is not the configuration of a decoder: {missing}", fix="name a causal LM") from error


def _facts(raw: dict[str, Any], config: dict[str, Any], generation: dict[str, Any]) -> TargetFacts:
    model_type = str(config.get("model_type") or raw.get("model_type", ""))
    config = {**_CLASS_DEFAULTS.get(model_type, {}), **config}
    tied = model_type.removesuffix("_text") in _TIED_TYPES
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    dtypes = [place.get(name) for place in (config, raw) for name in ("dtype", "torch_dtype")]
    dtype = str(next((dtype for dtype in dtypes if dtype), "float32"))
    return TargetFacts(
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        vocab_size=int(config["vocab_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate_size=int(config.get("intermediate_size") or 0),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", raw.get("tie_word_embeddings", tied))),
        model_type=model_type,
        max_positions=int(config.get("max_position_embeddings") or 0),
        rope_theta=_rope_theta(config),
        rms_norm_eps=float(config.get("rms_norm_eps") or config.get("layer_norm_epsilon") or 1e-6),
        recurrent=_is_recurrent(model_type, config),
        embedding_scale=_embedding_scale(model_type, hidden, config),
        logit_softcap=_optional_float(config.get("final_logit_softcapping")),
        architectures=tuple(raw.get("architectures") or ()),
        dtype=dtype.removeprefix("torch."),
        bos_token_ids=_ids(raw, config, generation, "bos_token_id"),
        eos_token_ids=_ids(raw, config, generation, "eos_token_id"),
        pad_token_ids=_ids(raw, config, generation, "pad_token_id"),
        num_experts=int(config.get("num_experts") or config.get("num_local_experts") or 0),
        expert_intermediate_size=int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0),
        raw=raw,
    )


def _rope_theta(config: dict[str, Any]) -> float:
    """Base of the full-attention layers; transformers 5 has it in `rope_parameters`, by layer type if they differ."""
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)
    return float(config.get("rope_theta") or parameters.get("rope_theta") or 10_000.0)


def _is_recurrent(model_type: str, config: dict[str, Any]) -> bool:
    layers = " ".join(str(kind) for kind in config.get("layer_types") or ())
    return model_type.startswith(_RECURRENT_TYPES) or any(kind in layers for kind in _RECURRENT_LAYERS)


def _embedding_scale(model_type: str, hidden_size: int, config: dict[str, Any]) -> float:
    """Gemma multiplies by sqrt(hidden size), Granite by a number of its own."""
    if model_type.startswith("gemma"):
        return math.sqrt(hidden_size)
    return float(config.get("embedding_multiplier") or 1.0)


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _ids(raw: dict[str, Any], config: dict[str, Any], generation: dict[str, Any], name: str) -> tuple[int, ...]:
    """Token ids under one name in all three places; each may be absent, a number or a list."""
    found: list[int] = []
    for place in (config, raw, generation):
        value = place.get(name)
        found += [int(i) for i in (value if isinstance(value, list) else [value]) if i is not None]
    return tuple(dict.fromkeys(found))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        fix = "name the folder of a Hugging Face checkpoint in target.model"
        raise ModelError(f"there is no {path}", fix=fix) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object", fix="download the model again")
    return content


def unreadable(path: Path, error: OSError | ValueError) -> ModelError:
    """A file of a model that is there, and is no JSON or may not be read."""
    if isinstance(error, OSError):
        return ModelError(f"{path} cannot be read: {error.strerror}", fix="check the permissions of the model's files")
    return ModelError(f"{path} cannot be read: {error}", fix="download the model again")


@cache
def _tell_of_hub(model: str) -> None:
    """Once for a model: a mistyped folder looks like a name."""
    _log.warning("%s is no folder here: asking the hub for it", model)


def _out_of_reach(model: str) -> ModelError:
    return ModelError(f"{model!r} is no folder, not in the hub's cache, and the hub cannot be reached", fix=_FIX)


def _reach_hub(model: str, file: str) -> None:
    """Ask once, where a download would try for half a minute whatever the cause; any answer is left to the download.

    Raises:
        ModelError: nobody listens there, or the name of the hub is unknown.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(model, file), timeout=5)
    except Exception as error:
        if type(error).__name__ == "ConnectError":  # of httpx or httpx2, as the version of huggingface_hub has it
            raise _out_of_reach(model) from error
        _log.debug("asking the hub for %s of %s: %s", file, model, error)  # the download says it better


def find_model_file(model: str, file: str) -> Path | None:
    """A file of the model, in its folder or from the hub (cached or downloaded); None where the model has none.

    Raises:
        ModelError: the model is no folder, and the hub does not know it or cannot be reached.
    """
    if Path(model).is_dir():
        path = Path(model) / file
        return path if path.is_file() else None
    if model.startswith(("/", ".", "~")) or Path(model).is_file():
        found = f"{model} is a file" if Path(model).is_file() else f"there is no folder {model}"
        raise ModelError(found, fix="name the folder of the model")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cached = try_to_load_from_cache(model, file)
    if isinstance(cached, str):
        return Path(cached)
    _tell_of_hub(model)
    _reach_hub(model, file)
    try:
        return Path(hf_hub_download(model, file, etag_timeout=5))
    except LocalEntryNotFoundError as error:
        raise _out_of_reach(model) from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # huggingface_hub raises a dozen unrelated classes here, all with the same remedy
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{model!r} is neither a folder nor on the hub: {reason}", fix=_FIX) from error
