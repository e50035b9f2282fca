"""validate and export of causal LMs, on a tiny trained world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.checkpoint.lm_export import LMCard, export_lm
from helixctl.checkpoint.store import load_checkpoint
from helixctl.errors import CheckpointError
from helixctl.models.attention import SegmentPacking
from helixctl.models.tokenizer import HelixTokenizer
from helixctl.training.lm_commands import run_lm_export
from helixctl.training.lm_validate import run_lm_validation
from helixctl.training.run import run_training
from tests.data import templates
from tests.lm_worlds import make_lm_world, make_lm_world_plan
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_lm_world(tmp_path_factory.mktemp("lm"))
    run_training(make_lm_world_plan(made, "validation.rows=64"))
    return made


def test_validation_repeats_what_the_run_measured_and_proves_the_loss(recipe: Path) -> None:
    result = run_lm_validation(make_lm_world_plan(recipe, "validation.prompts=[one]", "validation.max_new_tokens=4"))
    best = json.loads((recipe.parent / "run" / "checkpoints" / "best.json").read_text())
    (measured,) = result.held_out.values()
    assert measured["val/loss"] == pytest.approx(best["value"], rel=1e-6)
    assert [proof.passed for proof in result.proofs] == [True, True], result.proofs
    assert [one.prompt for one in result.samples] == ["one"] and result.samples[0].num_tokens <= 4


def test_documents_that_see_each_other_fail_the_proof(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(self: SegmentPacking, spans: Any, original: Any = SegmentPacking.__init__) -> None:
        original(self, tuple(((0, row[-1][1]),) if row else () for row in spans))

    monkeypatch.setattr(SegmentPacking, "__init__", joined)
    result = run_lm_validation(make_lm_world_plan(recipe))
    assert [proof.passed for proof in result.proofs] == [False, False], result.proofs


def test_an_export_is_an_ordinary_folder_with_the_trained_weights(recipe: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plan = make_lm_world_plan(recipe)
    result = run_lm_export(plan, checkpoint=recipe.parent / "run/checkpoints/step-00000008", output=tmp_path / "out")
    assert result.max_logit_diff < 1e-5 and result.tensors > 10
    model = AutoModelForCausalLM.from_pretrained(result.dir, dtype=torch.float32)
    trained = load_checkpoint(recipe.parent / "run/checkpoints/step-00000008").tensors["model"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[name].bfloat16().float()), name
    tokenizer = AutoTokenizer.from_pretrained(result.dir)
    stops = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    assert set(model.generation_config.eos_token_id) == set(stops)
    config = json.loads((result.dir / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    card = (result.dir / "README.md").read_text()
    assert "val/perplexity" in card and str(recipe.parent) not in card and "learning_rate: 0.003" in card
    again = run_lm_export(plan, output=tmp_path / "out")
    assert again.dir == result.dir, "an export may replace an export"


MAMBA2 = (
    "{model_type: mamba2, vocab_size: 320, hidden_size: 32, num_hidden_layers: 2, num_heads: 4, "
    "num_attention_heads: 4, head_dim: 16, state_size: 16, n_groups: 1, expand: 2, conv_kernel: 4, chunk_size: 16}"
)
GPT2 = "{model_type: gpt2, vocab_size: 320, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 128}"


@pytest.mark.parametrize(("config", "packing"), [(GPT2, "continuous"), (MAMBA2, "document")])
def test_other_architectures_train_and_export(config: str, packing: str, recipe: Path, tmp_path: Path) -> None:
    """Learned positions and dropout in the configuration; a state along the row, which needs a document per row."""
    overrides = [f"model.config={config}", f"data.packing={packing}", f"run.dir={tmp_path / 'run'}"]
    plan = make_lm_world_plan(recipe, *overrides, "stages.0.steps=2", "stages.1.steps=1")
    assert run_training(plan).finished
    assert all(proof.passed for proof in run_lm_validation(plan).proofs)
    assert run_lm_export(plan).max_logit_diff < 1e-4


def test_positions_are_turned_by_exact_angles_in_what_an_export_is_compared_with(tmp_path: Path) -> None:
    """Angles rounded to bfloat16 show only where attention is sharp, as in a trained model."""
    model = tiny_llama(vocab_size=320, head_dim=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(40.0)
            layer.self_attn.k_proj.weight.mul_(40.0)
    result = export_lm(model, HelixTokenizer(templates.byte_tokenizer()), LMCard("sharp"), tmp_path / "out")
    assert result.max_logit_diff < 1e-5


def test_an_export_replaces_nothing_else(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not an export"):
        run_lm_export(make_lm_world_plan(recipe), output=tmp_path)


def test_another_models_checkpoint_is_refused(recipe: Path) -> None:
    with pytest.raises(CheckpointError, match="another model"):
        run_lm_validation(make_lm_world_plan(recipe, "model.config.intermediate_size=96"))
