"""Published formats: what each consumer reads, in both directions, and the counting of each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helixctl.checkpoint.export import export_drafter
from helixctl.checkpoint.published import formats_of, is_published, load_format, open_published
from helixctl.errors import CheckpointError, UsageError
from helixctl.models.drafters.dflash.formats import speculators, zlab
from helixctl.models.drafters.dflash.options import Options
from helixctl.models.drafters.dflash.published import Published, describe, options_of, own_tensor_name, served_positions
from tests.checkpoint.builders import edit_config, export_to, make_drafter, make_facts, make_source

TAPS = (1, 4)


def make_published(block_size: int = 8, **facts: Any) -> Published:
    options = Options(num_layers=2, block_size=block_size, mask_token_id=7)
    return describe(options, make_facts(**facts), TAPS, "org/target-8b")


def test_the_algorithm_has_these_formats() -> None:
    assert formats_of("dflash") == ("speculators", "zlab")
    with pytest.raises(UsageError, match="zlb"):
        load_format("dflash", "zlb")


def test_zlab_has_everything_twice_where_consumers_look_twice() -> None:
    config = zlab.write(make_published())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert (config["is_causal"], config["dflash_config"]["causal"]) == (False, False)
    assert config["dflash_config"]["target_layer_ids"] == [1, 4]
    assert config["architectures"] == ["DFlashDraftModel"]


def test_speculators_counts_layers_from_one_and_drafted_tokens_without_the_anchor() -> None:
    config = speculators.write(make_published(block_size=8))
    assert config["aux_hidden_state_layer_ids"] == [2, 5]
    assert config["block_size"] == 8
    (method,) = config["speculators_config"]["proposal_methods"]
    assert method == {"proposal_type": "greedy", "speculative_tokens": 7}
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/target-8b",
        "architectures": ["LlamaForCausalLM"],
    }
    # What vLLM negates into the drafter's causality, and takes as true where it is missing.
    assert config["sliding_window_non_causal"] is True
    assert config["sample_from_anchor"] is False
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "qwen3" and layer["num_hidden_layers"] == 2
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"]


def vllm_reads_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's reader of the format makes of it, in our own words (git 055e47c)."""
    ids = config["aux_hidden_state_layer_ids"]
    section = {"target_layer_ids": [i - 1 for i in ids], "mask_token_id": config["mask_token_id"]}
    section["causal"] = not config.get("sliding_window_non_causal", False)
    count = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    return {**config["transformer_layer_config"], "dflash_config": section, "num_speculative_tokens": count}


@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_vllm_gets_the_same_drafter_from_both_formats(block_size: int) -> None:
    drafter = make_published(block_size)
    one, other = zlab.write(drafter), vllm_reads_speculators(speculators.write(drafter))
    assert other["num_speculative_tokens"] == block_size - 1
    for key in ("target_layer_ids", "mask_token_id", "causal"):
        assert other["dflash_config"][key] == one["dflash_config"][key]
    decoder = ("num_hidden_layers", "hidden_size", "head_dim", "rms_norm_eps", "rope_parameters", "vocab_size")
    assert all(other[key] == one[key] for key in (*decoder, "max_position_embeddings", "layer_types"))


@pytest.mark.parametrize("name", ["zlab", "speculators"])
def test_reading_gives_what_was_written(name: str) -> None:
    form, drafter = load_format("dflash", name), make_published()
    read = form.read(json.loads(json.dumps(form.write(drafter))))
    all_unsaid: dict[str, dict[str, Any]] = {
        "zlab": {"target": None, "target_architectures": ()},
        "speculators": {"num_target_layers": None},
    }
    unsaid = all_unsaid[name]
    assert read == replace(drafter, **unsaid)
    assert options_of(read).block_size == 8


def test_scaled_embeddings_and_capped_logits_are_told_or_refused() -> None:
    drafter = make_published(embedding_scale=5.5, logit_softcap=30.0)
    assert zlab.read(zlab.write(drafter)).embedding_scale == 5.5
    assert zlab.read(zlab.write(drafter)).logit_softcap == 30.0
    with pytest.raises(CheckpointError, match=r"scales its embeddings by 5.5 and caps its logits at 30.*cannot say"):
        speculators.write(drafter)


def test_stretched_positions_count_as_far_as_the_target_is_served() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 98304}
    raws: list[dict[str, Any]] = [
        {"rope_scaling": yarn},
        {"rope_parameters": yarn},
        {"text_config": {"rope_scaling": yarn}},
    ]
    for raw in raws:
        facts = make_facts(max_positions=131072, raw=raw)
        assert served_positions(facts) == 393216
    assert served_positions(make_facts(max_positions=256, raw={"rope_scaling": None})) == 256


OLD_STYLE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "block_size": 6,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 7},
}


def test_checkpoints_of_older_stacks_are_read_too() -> None:
    drafter = zlab.read(OLD_STYLE)
    assert (drafter.block_size, drafter.rope_theta, drafter.head_dim) == (6, 5e5, 8)
    assert drafter.taps == (1, 33)  # the authors' formula
    assert zlab.formula(36, 5) == (1, 9, 17, 25, 33)
    assert zlab.formula(28, 1) == (14,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding windows"),
        ({"attention_bias": True}, "biases"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "scaled"),
        ({"dflash_config": {"mask_token_id": 7, "conv_kernel_size": 2}}, "conv_kernel_size"),
        ({"dflash_config": {"mask_token_id": 7, "causal": True}}, "causal"),
        ({"draft_vocab_size": 50}, "reduced vocabulary of 50"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"block_size": None, "rms_norm_eps": None}, "rms_norm_eps is missing; block_size is missing"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        zlab.read({**OLD_STYLE, **changes})


def test_the_speculators_export_computes_the_same(tmp_path: Path) -> None:
    source = replace(make_source(), format="speculators")
    result = export_drafter(make_drafter(source), source, tmp_path / "out")
    assert result.max_logit_diff < 1e-3
    assert result.commands == {"vLLM": f"vllm serve {tmp_path / 'out'}"}
    other = export_to(tmp_path / "zlab")
    one, two = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", other))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_folder_says_what_it_is(tmp_path: Path) -> None:
    for name in formats_of("dflash"):
        found = open_published(export_to(tmp_path / name, name))
        assert (found.algorithm, found.format, len(found.tensors)) == ("dflash", name, 25)
        assert found.describe().taps == TAPS
        assert is_published(tmp_path / name)
    edit_config(tmp_path / "zlab", dflash_config=None)
    with pytest.raises(CheckpointError, match="nor a drafter that helixctl knows"):
        open_published(tmp_path / "zlab")


@pytest.mark.parametrize("damage", ["torn", "none", "bin", "text"])
def test_broken_folders_say_what_is_broken(tmp_path: Path, damage: str) -> None:
    folder = export_to(tmp_path / "out")
    weights = folder / "model.safetensors"
    if damage == "torn":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "text":
        weights.write_text("version https://git-lfs.github.com/spec/v1")
    else:
        weights.rename(folder / ("pytorch_model.bin" if damage == "bin" else "other"))
    words = {"torn": "torn", "none": r"no \.safetensors", "bin": r"pytorch_model\.bin", "text": "no safetensors file"}
    with pytest.raises(CheckpointError, match=words[damage]):
        open_published(folder)


def test_names_of_other_trainers() -> None:
    assert own_tensor_name("model.layers.0.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert own_tensor_name("context_proj.weight") == "fc.weight"
    assert own_tensor_name("final_norm.weight") == "norm.weight"
    for name in ("embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "model.embed_tokens.weight"):
        assert own_tensor_name(name) is None
