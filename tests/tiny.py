"""Tiny random models, in float32 unless said: `tiny_llama()` and friends build one, `save_tiny` writes its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # Far from the default 0.02, with which every attention of a tiny model is uniform and masks would not matter.
    "initializer_range": 0.3,
}


def build(config: transformers.PretrainedConfig, seed: int = 0) -> Any:
    """A random causal LM in eval mode; norms and biases are random too, so that none can be forgotten unnoticed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval().requires_grad_(False)


def tiny_llama(seed: int = 0, **sizes: Any) -> Any:
    return build(transformers.LlamaConfig(**SIZES | sizes), seed)


def tiny_qwen3(seed: int = 0, **sizes: Any) -> Any:
    return build(transformers.Qwen3Config(**SIZES | sizes), seed)


def tiny_mistral(seed: int = 0, **sizes: Any) -> Any:
    """Every layer has a window of 8."""
    return build(transformers.MistralConfig(**SIZES | {"sliding_window": 8} | sizes), seed)


def tiny_gemma3_config(**sizes: Any) -> Any:
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    special = {"layer_types": layers, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
    return transformers.Gemma3TextConfig(**SIZES | special | sizes)


def tiny_gemma3(seed: int = 0, **sizes: Any) -> Any:
    """Sliding and full layers, scaled embeddings, tied head."""
    return build(tiny_gemma3_config(**sizes), seed)


def tiny_gemma2(seed: int = 0, **sizes: Any) -> Any:
    """Softcaps on scores and logits, sliding and full layers."""
    special = {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}
    return build(transformers.Gemma2Config(**SIZES | special | {"final_logit_softcapping": 3.0} | sizes), seed)


def tiny_phi3(seed: int = 0, **sizes: Any) -> Any:
    """Fused projections; no head_dim of its own."""
    general = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return build(transformers.Phi3Config(**general | {"sliding_window": None} | sizes), seed)


def tiny_gpt_oss(seed: int = 0, **sizes: Any) -> Any:
    """Attention sinks, experts, sliding and full layers."""
    special = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    return build(transformers.GptOssConfig(**SIZES | special | sizes), seed)


def tiny_gemma3_multimodal(seed: int = 0) -> Any:
    """A vision tower beside the text decoder, whose configuration is nested in `text_config`."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tiny_gemma3_config()
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=1
    )
    return build(config, seed)


def tiny_lfm2(seed: int = 0, **sizes: Any) -> Any:
    """Convolution layers that carry a state, and one attention layer."""
    layers = ["conv", "conv", "full_attention", "conv"]
    general = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return build(transformers.Lfm2Config(**general | {"layer_types": layers} | sizes), seed)


def save_tiny(model: Any, folder: Path) -> Path:
    """Write the checkpoint folder (no tokenizer)."""
    model.save_pretrained(folder)
    return folder
