"""Causal LMs end to end on a tiny world: stages, resume bit for bit, several loops, chats, samples, loss per token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.checkpoint.store import load_checkpoint
from helixctl.errors import CheckpointError, DataError, StageFailed, UsageError
from helixctl.models.causal_lm import CausalLM
from helixctl.training.run import run_training
from tests.lm_worlds import CHAT_STAGE, make_lm_world, make_lm_world_plan, prepare_lm_world
from tests.training.worlds import tensors_equal


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lm_world(tmp_path_factory.mktemp("lm"))


def run(recipe: Path, folder: Path, *overrides: str, resume: bool = False) -> Any:
    return run_training(make_lm_world_plan(recipe, f"run.dir={folder}", *overrides), resume=resume)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith("perf/")} for line in lines]


def final(run_dir: Path, step: int = 8) -> Any:
    return load_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}")


def assert_same(one: Path, other: Path) -> None:
    a, b = final(one), final(other)
    assert tensors_equal(a.tensors["model"], b.tensors["model"])
    assert tensors_equal(a.tensors["optimizer"], b.tensors["optimizer"])


def test_a_run_trains_validates_saves_and_accounts_for_everything(recipe: Path, tmp_path: Path) -> None:
    result = run(recipe, tmp_path / "run")
    assert result.finished and result.steps == 8
    assert result.accounting["micro-batches produced"] == 8 + 3 * 2  # passes after steps 3, 6 and 8, of two batches
    assert result.accounting["micro-batches in flight at the end"] == 0
    assert result.accounting["documents read"] == 60
    lines = metrics(tmp_path / "run")
    validated = [line for line in lines if "val/loss" in line]
    assert [line["step"] for line in validated] == [3, 6, 8]
    assert all(
        line["val/perplexity"] == pytest.approx(torch.tensor(line["val/loss"]).exp().item()) for line in validated
    )
    assert result.best_step in {3, 6, 8} and result.best_value == min(line["val/loss"] for line in validated)
    rates = {line["step"]: line["train/learning_rate"] for line in lines if "train/learning_rate" in line}
    assert rates[2] > rates[4] < rates[6] > rates[8], "the second stage has a schedule of its own"


def test_the_loss_falls(recipe: Path, tmp_path: Path) -> None:
    run(recipe, tmp_path, "stages.0.steps=60", "stages.0.schedule=constant", "validation.every_steps=0")
    losses = [line["train/loss"] for line in metrics(tmp_path) if "train/loss" in line]
    assert losses[-1] < 0.6 * losses[0]


def test_resume_after_a_failure_equals_the_uninterrupted_run(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure stands in the second stage, behind a checkpoint of the first."""
    overrides = ["stages.1.optimizer=fresh", "train.grad_accum_steps=2"]
    run(recipe, tmp_path / "whole", *overrides)
    original = CausalLM.loss

    def failing(self: CausalLM, slot: Any) -> Any:
        if slot.batch.seq >= 11:
            raise RuntimeError("the model lost its mind")
        return original(self, slot)

    monkeypatch.setattr(CausalLM, "loss", failing)
    with pytest.raises(StageFailed, match="stage 'trainer-0' failed: RuntimeError: the model lost its mind"):
        run(recipe, tmp_path / "run", *overrides)
    monkeypatch.setattr(CausalLM, "loss", original)
    assert run(recipe, tmp_path / "run", *overrides, resume=True).finished
    assert_same(tmp_path / "whole", tmp_path / "run")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")


def test_a_fresh_optimizer_forgets_and_a_carried_one_does_not(recipe: Path, tmp_path: Path) -> None:
    for name in ("carry", "fresh"):
        run(recipe, tmp_path / name, f"stages.1.optimizer={name}", "validation.every_steps=0")
    steps = {
        name: int(final(tmp_path / name).tensors["optimizer"]["model.norm.weight.step"]) for name in ("carry", "fresh")
    }
    assert steps == {"carry": 8, "fresh": 4}
    before, after = (final(tmp_path / name, 4).tensors for name in ("carry", "fresh"))
    assert tensors_equal(before["model"], after["model"]) and tensors_equal(before["optimizer"], after["optimizer"])


def test_more_readers_change_nothing_and_loops_share_a_step_within_rounding(recipe: Path, tmp_path: Path) -> None:
    run(recipe, tmp_path / "one", "train.grad_accum_steps=2")
    run(recipe, tmp_path / "readers", "train.grad_accum_steps=2", "pipeline.readers=3")
    assert_same(tmp_path / "one", tmp_path / "readers")
    run(recipe, tmp_path / "loops", "pipeline.trainers=[cpu, cpu]")
    one, two = (final(tmp_path / name).tensors["model"] for name in ("one", "loops"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
    values = [[line for line in metrics(tmp_path / name) if "val/loss" in line][-1] for name in ("one", "loops")]
    assert values[0]["val/loss"] == pytest.approx(values[1]["val/loss"], rel=1e-4)


def test_validation_counts_every_token_once_however_it_is_batched(recipe: Path, tmp_path: Path) -> None:
    """The mean is over tokens, not over batches: the same weights give the same loss for any number of rows."""
    found = []
    for rows in (1, 3, 4):
        overrides = [f"train.micro_batch_rows={rows}", "stages.0.steps=1", "stages.0.learning_rate=1.0e-30"]
        more = ["stages.1.steps=1", "stages.1.learning_rate=1.0e-30", "validation.rows=64"]
        result = run(recipe, tmp_path / str(rows), *overrides, *more)
        found.append(result.validation["val/loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6) == pytest.approx(found[2], rel=1e-6)


def test_a_stage_of_chats_learns_answers_only(recipe: Path, tmp_path: Path) -> None:
    chats = CHAT_STAGE % (recipe.parent / "chats.jsonl", tmp_path / "chats")
    prepare_lm_world(recipe, chats)
    seen: list[tuple[int, int]] = []

    def looking(self: CausalLM, slot: Any, original: Any = CausalLM.loss) -> Any:
        terms = original(self, slot)
        seen.append((int(terms.denominator), slot.batch.num_tokens))
        return terms

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalLM, "loss", looking)
        result = run(recipe, tmp_path / "run", chats)
    assert result.finished and result.accounting["documents read"] == 80
    texts, answers = seen[:4], seen[4:]
    learnt = [[sum(column) for column in zip(*part, strict=True)] for part in (texts, answers)]
    assert learnt[0][0] > 0.8 * learnt[0][1]
    assert 0 < learnt[1][0] < 0.7 * learnt[1][1]


def test_samples_follow_every_pass_and_a_resume_forgets_later_ones(recipe: Path, tmp_path: Path) -> None:
    overrides = ["validation.prompts=['one 1', '']", "validation.max_new_tokens=5"]
    run(recipe, tmp_path, *overrides)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(s, p) for s in (3, 6, 8) for p in ("one 1", "")]
    assert all(line["num_tokens"] <= 5 for line in lines)
    for step in (8, 6):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        (folder / "manifest.json").unlink()
    run(recipe, tmp_path, *overrides, resume=True)
    assert [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == lines


def test_training_can_begin_with_a_checkpoint(recipe: Path, tmp_path: Path) -> None:
    from helixctl.models.causal_lm import build_causal_lm

    plan = make_lm_world_plan(recipe)
    model = build_causal_lm(plan.recipe.model, seed=77)
    model.save_pretrained(tmp_path / "weights")
    begin = [f"model.checkpoint={tmp_path / 'weights'}", "model.config=null", "stages.0.learning_rate=1.0e-30"]
    run(recipe, tmp_path / "run", *begin, "stages.1.learning_rate=1.0e-30", "train.weight_decay=0.0")
    assert tensors_equal(final(tmp_path / "run").tensors["model"], dict(model.state_dict()))


def test_what_changed_since_the_checkpoint_is_named(recipe: Path, tmp_path: Path) -> None:
    run(recipe, tmp_path)
    with pytest.raises(UsageError, match="already holds a run"):
        run(recipe, tmp_path)
    with pytest.raises(CheckpointError, match="stages"):
        run(recipe, tmp_path, "stages.0.learning_rate=0.5", resume=True)
    with pytest.raises(CheckpointError, match="model"):
        run(recipe, tmp_path, "model.config.intermediate_size=96", resume=True)


def test_a_store_of_another_tokenizer_is_refused(recipe: Path, tmp_path: Path) -> None:
    from tests.data import templates

    tokenizer = templates.byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(DataError, match="made with another tokenizer"):
        run(recipe, tmp_path / "run", f"model.tokenizer={tmp_path / 'other'}")
