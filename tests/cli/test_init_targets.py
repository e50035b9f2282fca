"""`init` for the targets that most people have, from their published shapes alone: no weights, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helixctl.machine import Gpu, Machine
from helixctl.models.facts import target_parameters
from helixctl.plan import make_plan
from helixctl.recipe.load import load_recipe
from tests.chats import conversations, write_jsonl
from tests.cli.runner import Runner
from tests.conftest import ROOT
from tests.data.templates import byte_tokenizer

HOST = Machine(
    num_cpus=64,
    total_memory_bytes=512 << 30,
    gpus=(Gpu("H200", "GPU-0", 140 << 30), Gpu("H200", "GPU-1", 140 << 30)),
    has_bf16_cpu=True,
)
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": json.loads((ROOT / "tests/fixtures/qwen3-8b-config.json").read_text()),
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
    },
    "gemma-3-4b": {  # as published: what is the class's default is left out
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        "rope_theta": 150000,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
}
PARAMETERS = {
    "Qwen3-8B": 8.19e9,
    "Llama-3.1-8B": 8.03e9,
    "SmolLM2-135M": 134.5e6,
    "gemma-3-4b": 3.88e9,
    "gpt-oss-20b": 20.9e9,
}
"""Of the language model, as published."""
TAPS = {
    "Qwen3-8B": (1, 9, 17, 25, 33),
    "Llama-3.1-8B": (1, 8, 15, 22, 29),
    "SmolLM2-135M": (1, 8, 14, 20, 27),
    "gemma-3-4b": (1, 8, 16, 24, 31),
    "gpt-oss-20b": (1, 6, 11, 16, 21),
}


@pytest.mark.parametrize("name", SHAPES)
def test_init_writes_a_recipe_that_plans(
    name: str, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    byte_tokenizer().save_pretrained(folder)
    write_jsonl(tmp_path / "data.jsonl", conversations(20))
    done = run("init", f"models/{name}", "data.jsonl")
    assert done.code == 0, done.err
    plan = make_plan(load_recipe(tmp_path / "recipe.yaml"), HOST)
    text = SHAPES[name].get("text_config", SHAPES[name])
    assert plan.target_layer_ids == TAPS[name]
    vocab_size = text.get("vocab_size", 262208)
    assert (plan.target.vocab_size, plan.target.hidden_size) == (vocab_size, text["hidden_size"])
    assert target_parameters(plan.target) == pytest.approx(PARAMETERS[name], rel=0.01)
    mask = plan.recipe.drafter.mask_token_id
    assert len(byte_tokenizer()) <= mask < vocab_size
    assert mask not in (*plan.target.eos_token_ids, *plan.target.pad_token_ids, *plan.target.bos_token_ids)
    assert not plan.lacks
    assert plan.recipe.drafter.scale_embeddings == ("gemma" not in name)
