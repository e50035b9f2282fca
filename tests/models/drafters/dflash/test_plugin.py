"""Initial weights, the published format both ways, sizes and estimates."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from pydantic import ValidationError

from helixctl.errors import CheckpointError, ModelError
from helixctl.models.drafters.dflash import plugin
from helixctl.models.drafters.dflash.formats import speculators, zlab
from helixctl.models.drafters.dflash.options import make_shape, num_taps_of, parameter_count
from helixctl.models.drafters.dflash.published import describe
from helixctl.models.shared import SharedWeights
from tests.models.drafters.dflash.builders import FACTS, MASK, TAPS, make_model, make_options

# What z-lab's loader, vLLM and SGLang read (dflash-spec 4.1).
CONSUMED = {
    "architectures",
    "auto_map",
    "model_type",
    "block_size",
    "num_target_layers",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "is_causal",
    "tie_word_embeddings",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "attention_dropout",
    "use_cache",
}


def test_build_is_a_function_of_the_seed_alone():
    options = make_options()
    torch.manual_seed(1)
    first = plugin.build(options, FACTS, TAPS, 7).state_dict()
    state = torch.random.get_rng_state()
    second, other = (plugin.build(options, FACTS, TAPS, seed).state_dict() for seed in (7, 8))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert all(t.dtype == torch.float32 for t in first.values())
    assert abs(first["fc.weight"].std() - 0.02) < 1e-3
    assert all((t == 1).all() for t in first.values() if t.dim() == 1)


def test_published_tensor_names_and_shapes():
    state = plugin.export_state(make_model())
    assert len(state) == 2 + 1 + 11 * 2
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    assert (
        shapes.items()
        >= {
            "fc.weight": (32, 96),
            "hidden_norm.weight": (32,),
            "norm.weight": (32,),
            "layers.1.input_layernorm.weight": (32,),
            "layers.1.post_attention_layernorm.weight": (32,),
            "layers.1.self_attn.q_proj.weight": (32, 32),
            "layers.1.self_attn.k_proj.weight": (16, 32),
            "layers.1.self_attn.v_proj.weight": (16, 32),
            "layers.1.self_attn.o_proj.weight": (32, 32),
            "layers.1.self_attn.q_norm.weight": (8,),
            "layers.1.self_attn.k_norm.weight": (8,),
            "layers.1.mlp.gate_proj.weight": (48, 32),
            "layers.1.mlp.up_proj.weight": (48, 32),
            "layers.1.mlp.down_proj.weight": (32, 48),
        }.items()
    )


def test_published_state_reads_back():
    model, other = make_model(0), make_model(5)
    plugin.import_state(other, plugin.export_state(model))
    for name, tensor in other.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, model.state_dict()[name].bfloat16().float())


def test_foreign_state_names_every_difference():
    state = plugin.export_state(make_model())
    state["extra"] = state.pop("norm.weight")
    state["fc.weight"] = state["fc.weight"][:, :64]
    with pytest.raises(CheckpointError, match=r"extra is unknown; fc.weight is \[32, 64\].*norm.weight is missing"):
        plugin.import_state(make_model(), state)


def test_config_has_every_key_that_is_read():
    config = zlab.write(describe(make_options(block_size=8), FACTS, TAPS, None))
    assert json.loads(json.dumps(config)) == config
    assert config.keys() >= CONSUMED
    section = config["dflash_config"]
    assert config["block_size"] == section["block_size"] == 8
    assert (section["mask_token_id"], section["target_layer_ids"], section["causal"]) == (MASK, [1, 3, 5], False)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": config["rope_theta"]}
    assert config["is_causal"] is False and config["layer_types"] == ["full_attention"] * 2
    assert config["num_target_layers"] == 8 and config["num_hidden_layers"] == 2
    assert "input_embedding_scale" not in section and "final_logit_softcapping" not in section


def test_config_tells_of_scaled_embeddings_and_capped_logits():
    facts = dataclasses.replace(FACTS, embedding_scale=5.5, logit_softcap=30.0)
    section = zlab.write(describe(make_options(), facts, TAPS, None))["dflash_config"]
    assert (section["input_embedding_scale"], section["final_logit_softcapping"]) == (5.5, 30.0)


def test_parameter_count_is_exact():
    for values in ({}, {"num_layers": 3, "head_dim": 6, "num_heads": 6, "num_kv_heads": 3, "intermediate_size": 20}):
        options = make_options(**values)
        model = plugin.build(options, FACTS, TAPS, 0)
        assert parameter_count(options, FACTS) == sum(p.numel() for p in model.parameters())


def test_sizes_come_from_options_first_and_from_the_target_else():
    shape = make_shape(make_options(head_dim=16, rope_theta=1e6), FACTS)
    assert (shape.head_dim, shape.num_heads, shape.rope_theta, shape.num_taps) == (16, 4, 1e6, 3)
    assert num_taps_of(make_options(target_layer_ids=[1, 2])) == 2
    assert num_taps_of(make_options(num_taps=None, num_layers=4)) == 4


@pytest.mark.parametrize(
    "values",
    [
        {"loss": {"decay_gamma": 0}},
        {"loss": {"sampled_classes": 0}},
        {"loss": {"kl": -1.0}},
        {"loss": {"cross_entropy": 0}},
        {"loss": {"position_weights": "dpace", "decay_gamma": 4.0}},
        {"feature_noise": {"kind": "pink"}},
        {"head_dim": 7},
        {"num_heads": 3, "num_kv_heads": 2},
        {"block_size": 1},
        {"attention": "sdpa"},
    ],
)
def test_impossible_options_are_refused(values):
    with pytest.raises(ValidationError):
        make_options(**values)


@pytest.mark.parametrize(
    ("values", "changes"),
    [({"num_heads": 3}, {}), ({}, {"head_dim": 7}), ({}, {"intermediate_size": 0})],
)
def test_sizes_that_do_not_fit_the_target_are_refused(values, changes):
    with pytest.raises(ModelError):
        make_shape(make_options(**values), dataclasses.replace(FACTS, **changes))


def test_raw_embeddings_are_fed_and_exported_as_such():
    facts = dataclasses.replace(FACTS, embedding_scale=5.5)
    options = make_options(scale_embeddings=False)
    model = plugin.build(options, facts, TAPS, 0)
    shared = SharedWeights(torch.randn(FACTS.vocab_size, 32), torch.randn(4, 32), None, 5.5, None, torch.nn.Identity())
    ids = torch.tensor([3, 1])
    assert torch.equal(model.embed(ids, shared), shared.embedding[ids])
    scaled = plugin.build(make_options(), facts, TAPS, 0)
    assert torch.allclose(scaled.embed(ids, shared), shared.embedding[ids] * 5.5)
    published = describe(options, facts, TAPS, "org/gemma")
    assert published.embedding_scale == 1.0
    assert "input_embedding_scale" not in zlab.write(published)["dflash_config"]
    assert speculators.write(published)["mask_token_id"] == MASK
