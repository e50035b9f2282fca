"""Training end to end on a tiny world: accounting, resume bit for bit, several drafters, failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.checkpoint.store import load_checkpoint
from helixctl.errors import CheckpointError, StageFailed, UsageError
from helixctl.models.target import Target
from helixctl.training.run import run_training
from tests.training.worlds import make_world, make_world_plan, tensors_equal


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_world(tmp_path)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith("perf/")} for line in lines]


def final(run_dir: Path, step: int) -> Any:
    return load_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}")


def test_a_run_trains_validates_saves_and_accounts_for_everything(recipe: Path) -> None:
    result = run_training(make_world_plan(recipe))
    assert result.finished and result.steps == 6
    assert result.accounting["micro-batches produced"] == 6 + 2 * 2  # two passes of two rows
    assert result.accounting["micro-batches in flight at the end"] == 0
    assert result.accounting["documents read"] == 8
    [source] = result.sources.values()
    assert source["read"] == source["kept"] + sum(source["dropped"].values()) == 8
    assert {line["step"] for line in metrics(recipe.parent / "run") if "val/loss" in line} == {3, 6}
    assert json.loads((recipe.parent / "run" / "result.json").read_text())["steps"] == 6
    assert not (recipe.parent / "run" / "run.pid").exists()


def test_the_loss_falls_on_a_few_documents(recipe: Path) -> None:
    plan = make_world_plan(recipe, "train.steps=60", "train.log_every_steps=10", "train.schedule=constant")
    run_training(plan)
    losses = [line["train/loss"] for line in metrics(recipe.parent / "run") if "train/loss" in line]
    assert losses[-1] < 0.7 * losses[0]


def test_a_curriculum_is_part_of_what_a_resume_compares(recipe: Path) -> None:
    sorted_first = "data.curriculum={epochs: 2, spread: 0.0}"
    assert run_training(make_world_plan(recipe, sorted_first)).finished
    with pytest.raises(CheckpointError, match="changed since the checkpoint was written: curriculum"):
        run_training(make_world_plan(recipe), resume=True)
    assert run_training(make_world_plan(recipe, sorted_first), resume=True).finished


def test_same_recipe_same_parameters_bit_for_bit(recipe: Path) -> None:
    for name in ("one", "two"):
        run_training(make_world_plan(recipe, f"run.dir={recipe.parent / name}"))
    one, two = (final(recipe.parent / name, 6) for name in ("one", "two"))
    assert tensors_equal(one.tensors["drafter"], two.tensors["drafter"])
    assert tensors_equal(one.tensors["optimizer"], two.tensors["optimizer"])


def test_resume_after_a_failure_equals_the_uninterrupted_run(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_training(make_world_plan(recipe, f"run.dir={recipe.parent / 'whole'}"))
    original = Target.features

    def failing(self: Target, batch: Any, **options: Any) -> Any:
        if batch.seq == 7:
            raise RuntimeError("the target lost its mind")
        return original(self, batch, **options)

    monkeypatch.setattr(Target, "features", failing)
    with pytest.raises(StageFailed, match="stage 'target-0' failed: RuntimeError: the target lost its mind"):
        run_training(make_world_plan(recipe))
    monkeypatch.setattr(Target, "features", original)
    result = run_training(make_world_plan(recipe), resume=True)
    assert result.finished
    whole, resumed = final(recipe.parent / "whole", 6), final(recipe.parent / "run", 6)
    assert tensors_equal(whole.tensors["drafter"], resumed.tensors["drafter"])
    assert tensors_equal(whole.tensors["optimizer"], resumed.tensors["optimizer"])
    assert metrics(recipe.parent / "whole") == metrics(recipe.parent / "run")


@pytest.mark.parametrize("overrides", [["pipeline.targets=[cpu, cpu, cpu]"], ["pipeline.readers=3"]])
def test_more_targets_or_readers_change_nothing_bit_for_bit(recipe: Path, overrides: list[str]) -> None:
    run_training(make_world_plan(recipe, f"run.dir={recipe.parent / 'one'}"))
    run_training(make_world_plan(recipe, f"run.dir={recipe.parent / 'many'}", *overrides))
    one, many = final(recipe.parent / "one", 6), final(recipe.parent / "many", 6)
    assert tensors_equal(one.tensors["drafter"], many.tensors["drafter"])


def test_drafters_and_accumulation_take_the_same_steps_within_rounding(recipe: Path) -> None:
    splits = {"1x4": (1, 4), "2x2": (2, 2), "4x1": (4, 1)}
    found = {}
    for name, (drafters, accumulation) in splits.items():
        devices = ", ".join(["cpu"] * drafters)
        overrides = [
            f"run.dir={recipe.parent / name}",
            f"pipeline.drafters=[{devices}]",
            f"train.grad_accum_steps={accumulation}",
            "validation.rows=4",
        ]
        result = run_training(make_world_plan(recipe, *overrides))
        found[name] = (final(recipe.parent / name, 6).tensors["drafter"], result.validation)
    for name in ("2x2", "4x1"):
        for key, value in found["1x4"][0].items():
            torch.testing.assert_close(found[name][0][key], value, rtol=1e-4, atol=1e-5)
        assert found[name][1] == pytest.approx(found["1x4"][1], rel=1e-4)


def test_a_second_run_in_the_same_directory_is_refused_and_a_drifted_resume_names_what_changed(recipe: Path) -> None:
    run_training(make_world_plan(recipe))
    with pytest.raises(UsageError, match="already holds a run"):
        run_training(make_world_plan(recipe))
    with pytest.raises(CheckpointError, match=r"drafter, mask token"):
        run_training(make_world_plan(recipe, "drafter.mask_token_id=311"), resume=True)
    with pytest.raises(CheckpointError, match="optimizer"):
        run_training(make_world_plan(recipe, "train.learning_rate=0.5"), resume=True)
    with pytest.raises(CheckpointError, match="written: target's quantization\n"):
        run_training(make_world_plan(recipe, "target.quantization=fp8"), resume=True)


def test_a_float8_target_trains_and_its_run_is_not_resumed_with_another(recipe: Path) -> None:
    found = run_training(make_world_plan(recipe, "target.quantization=fp8"))
    assert found.finished
    other = make_world_plan(recipe, f"run.dir={recipe.parent / 'other'}")
    assert run_training(other).validation["val/loss"] != found.validation["val/loss"]
    assert run_training(make_world_plan(recipe, "target.quantization=fp8"), resume=True).finished
    with pytest.raises(CheckpointError, match="written: target's quantization\n"):
        run_training(make_world_plan(recipe), resume=True)


def test_resuming_a_finished_run_changes_nothing(recipe: Path) -> None:
    run_training(make_world_plan(recipe))
    before = final(recipe.parent / "run", 6)
    result = run_training(make_world_plan(recipe), resume=True)
    assert result.finished and result.steps == 6
    assert tensors_equal(before.tensors["drafter"], final(recipe.parent / "run", 6).tensors["drafter"])


def test_a_loss_that_stays_infinite_stops_the_run_and_names_the_documents(recipe: Path) -> None:
    plan = make_world_plan(recipe, "train.steps=20", "train.learning_rate=1.0e38", "train.max_grad_norm=1.0e30")
    with pytest.raises(StageFailed, match=r"not finite in 3 consecutive steps.*documents \d") as caught:
        run_training(plan)
    assert "learning_rate" in (caught.value.fix or "")


def test_a_failing_postprocess_thread_is_the_error_raised(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: Any) -> None:
        raise OSError("link down")

    monkeypatch.setattr("helixctl.training.stages.fill_slot", torn)
    with pytest.raises(StageFailed, match="stage 'target-0-post' failed: OSError: link down"):
        run_training(make_world_plan(recipe))
    assert not (recipe.parent / "run" / "run.pid").exists()


def test_a_run_directory_that_cannot_be_made_is_a_usage_error(recipe: Path) -> None:
    (recipe.parent / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        run_training(make_world_plan(recipe, f"run.dir={recipe.parent / 'file' / 'run'}"))


@pytest.mark.parametrize("link", ["run", "run/checkpoints", "run/metrics.jsonl", "run/run.pid"])
def test_links_in_the_run_directory_are_not_followed(recipe: Path, link: str) -> None:
    place, elsewhere = recipe.parent / link, recipe.parent / "elsewhere"
    elsewhere.mkdir()
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(elsewhere if link in ("run", "run/checkpoints") else elsewhere / "file")
    with pytest.raises(UsageError, match="links are not followed"):
        run_training(make_world_plan(recipe))
    assert not any(elsewhere.iterdir())


def test_secrets_are_not_saved(recipe: Path) -> None:
    secret = "hf_" + "a1B2" * 8
    plan = make_world_plan(recipe, f"data.train=[{{path: {recipe.parent}/{secret}.jsonl, format: tokens}}]")
    run_training(plan)
    written = [(recipe.parent / "run" / name).read_text() for name in ("recipe.yaml", "plan.json", "result.json")]
    assert all(secret not in text for text in written) and "(hidden)" in written[0]


def test_several_drafters_resume_bit_for_bit(recipe: Path) -> None:
    two = "pipeline.drafters=[cpu, cpu]"
    run_training(make_world_plan(recipe, f"run.dir={recipe.parent / 'whole'}", two))
    run_training(make_world_plan(recipe, two))
    newest = recipe.parent / "run" / "checkpoints" / "step-00000006"
    (newest / "drafter.safetensors").unlink()
    run_training(make_world_plan(recipe, two), resume=True)
    whole, resumed = final(recipe.parent / "whole", 6), final(recipe.parent / "run", 6)
    assert tensors_equal(whole.tensors["drafter"], resumed.tensors["drafter"])
