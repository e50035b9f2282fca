"""Facts from config.json: current and older spellings, nesting, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import huggingface_hub
import pytest

from helixctl.errors import ModelError
from helixctl.models.facts import (
    _CLASS_DEFAULTS,
    _TIED_TYPES,
    find_model_file,
    read_target_facts,
    target_parameters,
)
from helixctl.recipe.schema import TargetOptions

QWEN3_8B = Path(__file__).parent.parent / "fixtures" / "qwen3-8b-config.json"
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "intermediate_size": 96,
}


@pytest.fixture
def facts(tmp_path):
    def read(config, **more):
        (tmp_path / "config.json").write_text(json.dumps({**SMALL, **config}), encoding="utf-8")
        for name, content in more.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return read_target_facts(TargetOptions(model=str(tmp_path)))

    return read


def test_qwen3_8b():
    facts = read_target_facts(TargetOptions(model="Qwen/Qwen3-8B", config=QWEN3_8B))
    assert (facts.num_layers, facts.hidden_size, facts.head_dim, facts.num_kv_heads) == (36, 4096, 128, 8)
    assert facts.dtype == "bfloat16"
    assert facts.eos_token_ids == (151645,)
    assert not facts.recurrent
    assert target_parameters(facts) == pytest.approx(8.19e9, rel=1e-3)


def test_defaults_of_a_plain_config(facts):
    found = facts({"model_type": "llama"})
    assert (found.head_dim, found.num_kv_heads, found.rope_theta, found.dtype) == (16, 4, 10_000.0, "float32")
    assert (found.embedding_scale, found.logit_softcap) == (1.0, None)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}},
    ],
)
def test_rope_theta_in_every_spelling(facts, config):
    assert facts(config).rope_theta == 5e5


def test_nested_text_config_wins(facts):
    found = facts(
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {**SMALL, "hidden_size": 32, "model_type": "gemma3_text"},
        }
    )
    assert (found.hidden_size, found.model_type, found.dtype) == (32, "gemma3_text", "bfloat16")
    assert found.embedding_scale == math.sqrt(32)


def test_end_tokens_of_generation_config_count_too(facts):
    found = facts(
        {"eos_token_id": 2, "pad_token_id": None}, generation_config={"eos_token_id": [2, 7], "pad_token_id": 9}
    )
    assert found.eos_token_ids == (2, 7)
    assert found.pad_token_ids == (9,)


@pytest.mark.parametrize(
    ("config", "recurrent"),
    [
        ({"model_type": "mamba2"}, True),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, True),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"]}, False),
    ],
)
def test_recurrent_layers_are_noticed(facts, config, recurrent):
    assert facts(config).recurrent is recurrent


def test_experts_count_as_weights(facts):
    dense = target_parameters(facts({}))
    experts = target_parameters(facts({"num_experts": 8, "moe_intermediate_size": 96}))
    assert experts - dense == 4 * 7 * 3 * 64 * 96


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"logits_scaling": 8.0}, "scaled logits are not supported"),
        ({"hidden_size": None}, "not the configuration of a decoder"),
        ({"text_config": "x"}, "text_config is not a section"),
    ],
)
def test_unusable_configurations_are_refused(facts, config, words):
    with pytest.raises(ModelError, match=words):
        facts(config)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_target_facts(TargetOptions(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read"):
        read_target_facts(TargetOptions(model=str(tmp_path)))
    with pytest.raises(ModelError, match="there is no folder"):
        read_target_facts(TargetOptions(model="/nowhere/model"))
    with pytest.raises(ModelError, match=r"neither a folder|cannot be reached"):
        read_target_facts(TargetOptions(model="nobody/nothing"))


def test_a_stored_config_must_be_the_models_own(facts, tmp_path):
    facts({})
    with pytest.raises(ModelError, match="is not the configuration of"):
        read_target_facts(TargetOptions(model=str(tmp_path), config=QWEN3_8B))


def test_files_of_a_folder(tmp_path):
    (tmp_path / "a.json").touch()
    assert find_model_file(str(tmp_path), "a.json") == tmp_path / "a.json"
    assert find_model_file(str(tmp_path), "b.json") is None


def test_defaults_of_configuration_classes_are_those_of_transformers() -> None:
    """What published files leave out."""
    transformers = pytest.importorskip("transformers")
    for name in sorted({*_TIED_TYPES} & {*transformers.CONFIG_MAPPING.keys()}):
        assert transformers.CONFIG_MAPPING[name]().get_text_config().tie_word_embeddings, name
    for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "phi3", "gpt_oss", "glm4", "olmo2", "granite"):
        assert name not in _TIED_TYPES and not transformers.CONFIG_MAPPING[name]().tie_word_embeddings, name
    for name, values in _CLASS_DEFAULTS.items():
        defaults = transformers.CONFIG_MAPPING[name]()
        assert values == {key: getattr(defaults, key) for key in values}, name


def test_a_hub_out_of_reach_is_asked_once(monkeypatch):
    """A download would ask again for half a minute."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", None)
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        find_model_file("nobody/nothing", "config.json")
