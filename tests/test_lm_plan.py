"""Plans of causal LMs: steps of every stage, devices, mistakes that need the model or the store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helixctl.errors import ModelError, RecipeError
from helixctl.lm_plan import CausalLMPlan, make_any_plan, make_lm_plan
from helixctl.machine import Gpu, Machine, World
from tests.lm_worlds import CHAT_STAGE, MACHINE, load_lm, make_lm_world, make_lm_world_plan, prepare_lm_world

GPUS = tuple(replace(Gpu("NVIDIA H200", "GPU-0", 141 << 30), uuid=f"GPU-{i}") for i in range(4))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lm_world(tmp_path_factory.mktemp("lm"))


def mistakes(recipe: Path, *overrides: str, machine: Machine = MACHINE) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        make_lm_plan(load_lm(recipe, *overrides), machine)
    assert all(problem.fix for problem in caught.value.problems)
    return {problem.key: problem.message for problem in caught.value.problems}


def test_stages_stand_one_behind_the_other(recipe: Path) -> None:
    plan = make_lm_world_plan(recipe, "stages.0.steps=null", "stages.0.epochs=3")
    windows = plan.stages[0].windows
    assert windows is not None and windows > 2
    steps = 3 * windows // 2  # two rows a step
    assert [(stage.first_step, stage.num_steps) for stage in plan.stages] == [(0, steps), (steps, 4)]
    assert plan.total_steps == steps + 4
    assert plan.stages[0].warmup_steps == round(0.25 * steps)
    assert plan.stages[1].epochs == pytest.approx(4 * 2 / windows)


def test_tokens_are_rounded_up_to_steps(recipe: Path) -> None:
    plan = make_lm_world_plan(recipe, "stages.0.steps=null", "stages.0.tokens=200")
    assert plan.stages[0].num_steps == -(-200 // plan.tokens_per_step)
    assert 0 < plan.tokens_per_step <= 64


def test_without_a_store_epochs_are_unknown(recipe: Path, tmp_path: Path) -> None:
    store = f"data.store={tmp_path / 'none'}"
    plan = make_lm_world_plan(recipe, store, "stages.0.steps=null", "stages.0.epochs=3")
    assert plan.total_steps is None and plan.stages[1].first_step is None
    assert any("helixctl prepare" in warning for warning in plan.warnings)


def test_a_stage_has_the_windows_of_its_own_documents(recipe: Path, tmp_path: Path) -> None:
    chats = CHAT_STAGE % (recipe.parent / "chats.jsonl", tmp_path / "chats")
    prepare_lm_world(recipe, chats)
    plan = make_lm_world_plan(recipe, chats)
    assert plan.stages[0].windows != plan.stages[1].windows
    assert any("stage 1 is not validated" in w for w in plan.warnings) == (plan.stages[1].held_out_windows == 0)


def test_processes_and_loops_share_a_step(recipe: Path) -> None:
    machine = replace(MACHINE, gpus=GPUS, world=World(rank=1, size=4, local_rank=1, local_size=4))
    plan = make_lm_plan(load_lm(recipe, "train.grad_accum_steps=2"), machine)
    assert plan.trainer_devices == ("cuda:1",)
    assert (plan.num_trainers, plan.batches_per_step, plan.rows_per_step) == (4, 8, 16)
    alone = make_lm_plan(load_lm(recipe), replace(MACHINE, gpus=GPUS))
    assert alone.trainer_devices == ("cuda:0",)


def test_what_does_not_fit_is_told_by_key(recipe: Path) -> None:
    sizes = "hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2"
    config = f"model.config={{model_type: llama, vocab_size: 64, {sizes}}}"
    assert "made by a tokenizer of" in mistakes(recipe, config)["data.store"]
    assert "no cuda:7" in mistakes(recipe, "pipeline.trainers=[cuda:7]")["pipeline.trainers"]
    assert (
        "less than one step"
        in mistakes(recipe, "stages.0.steps=null", "stages.0.epochs=1", "train.grad_accum_steps=999")["stages.0.epochs"]
    )
    lfm = f"model.config={{model_type: lfm2, vocab_size: 320, {sizes}}}"
    assert "leak" in mistakes(recipe, lfm)["data.packing"]


def test_a_config_without_sizes_is_told(recipe: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.config is not the configuration of a decoder: .* is missing"):
        make_lm_world_plan(recipe, "model.config={model_type: llama, vocab_size: 64}")


def test_the_plan_is_plain_json(recipe: Path) -> None:
    plan = make_any_plan(load_lm(recipe), MACHINE)
    assert isinstance(plan, CausalLMPlan)
    told = json.loads(json.dumps(plan.to_json(), default=str))
    assert told["stages"][0]["options"]["learning_rate"] == 3.0e-3
    assert told["parameters"] == plan.parameters
