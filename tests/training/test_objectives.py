"""Losses that compare with the target's distribution, and feature noise, in whole runs: captured, repeated, shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.checkpoint.store import load_checkpoint
from helixctl.data.stored_features import FeaturesError
from helixctl.errors import RecipeError, StageFailed
from helixctl.models.target import Target
from helixctl.training.capture import Capture, run_capture
from helixctl.training.run import run_training
from tests.training.worlds import make_world, make_world_plan, tensors_equal

MIXED = (
    "drafter.loss={cross_entropy: 0.5, kl: 1.0, l1: 0.1, decay_gamma: 4.0}",
    "drafter.feature_noise={kind: gaussian, scale: 0.2}",
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_world(tmp_path)


def train(recipe: Path, name: str, *overrides: str, resume: bool = False) -> Any:
    run_training(make_world_plan(recipe, f"run.dir={recipe.parent / name}", *overrides), resume=resume)
    return load_checkpoint(recipe.parent / name / "checkpoints" / "step-00000006").tensors


def same(one: Any, other: Any) -> bool:
    return all(tensors_equal(one[part], other[part]) for part in ("drafter", "optimizer"))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_term_is_measured_in_training_and_validation(recipe: Path) -> None:
    plan = make_world_plan(recipe, *MIXED)
    assert plan.last_hidden and plan.captured_layers == (0, 2, 3)
    run_training(plan)
    found = lines(recipe.parent / "run")
    for group in ("train", "val"):
        values = next(line for line in found if f"{group}/loss" in line)
        terms = {name: values[f"{group}/{name}"] for name in ("cross_entropy", "kl", "l1")}
        assert all(value > 0 for value in terms.values())
        mixed = 0.5 * terms["cross_entropy"] + terms["kl"] + 0.1 * terms["l1"]
        assert values[f"{group}/loss"] == pytest.approx(mixed, rel=1e-4)


def test_a_divergence_alone_is_learned(recipe: Path) -> None:
    loss = "drafter.loss={cross_entropy: 0.0, kl: 1.0, kl_temperature: 2.0, decay_gamma: null}"
    run_training(make_world_plan(recipe, loss, "train.steps=30", "train.log_every_steps=10", "train.schedule=constant"))
    losses = [line["train/loss"] for line in lines(recipe.parent / "run") if "train/loss" in line]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("loss", ["{position_weights: dpace}", "{position_weights: dpace, cross_entropy: 0, kl: 1}"])
def test_dpace_is_learned_from(recipe: Path, loss: str) -> None:
    options = (f"drafter.loss={loss}", "train.steps=20", "train.schedule=constant")
    run_training(make_world_plan(recipe, *options))
    losses = [line["train/cross_entropy"] for line in lines(recipe.parent / "run") if "train/loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("how", ["pipeline.targets=[cpu, cpu]", "pipeline.readers=2", "resume"])
def test_noise_and_divergence_repeat_bit_for_bit(recipe: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(recipe, "whole", *MIXED)
    if how != "resume":
        assert same(whole, train(recipe, "other", *MIXED, how))
        return
    original = Target.features

    def failing(self: Target, batch: Any, **options: Any) -> Any:
        if batch.seq == 7:
            raise RuntimeError("killed")
        return original(self, batch, **options)

    monkeypatch.setattr(Target, "features", failing)
    with pytest.raises(StageFailed, match="killed"):
        train(recipe, "other", *MIXED)
    monkeypatch.setattr(Target, "features", original)
    assert same(whole, train(recipe, "other", *MIXED, resume=True))


def test_noise_differs_between_micro_batches_and_seeds(recipe: Path) -> None:
    noise = "drafter.feature_noise={kind: uniform, scale: 0.5}"
    plain, noisy = train(recipe, "plain"), train(recipe, "noisy", noise)
    assert not tensors_equal(plain["drafter"], noisy["drafter"])


def test_the_last_state_comes_from_the_cache_and_from_the_disk_too(recipe: Path) -> None:
    online = train(recipe, "online", "target.feature_cache_mib=64", *MIXED)
    folder = recipe.parent / "features"
    run_capture(Capture(make_world_plan(recipe, *MIXED), folder))
    assert same(online, train(recipe, "offline", f"target.features={folder}", *MIXED))


def test_stored_features_serve_recipes_that_need_less(recipe: Path) -> None:
    folder = recipe.parent / "features"
    run_capture(Capture(make_world_plan(recipe, *MIXED), folder))
    online = train(recipe, "online", "target.feature_cache_mib=64")
    assert same(online, train(recipe, "offline", f"target.features={folder}"))
    with pytest.raises(FeaturesError, match=r"taps \(0, 2, 3\), not \(0, 2\)"):
        Capture(make_world_plan(recipe), folder)


def test_stored_taps_without_the_last_state_are_refused(recipe: Path) -> None:
    folder = recipe.parent / "features"
    run_capture(Capture(make_world_plan(recipe), folder))
    with pytest.raises(RecipeError, match="taps"):
        make_world_plan(recipe, f"target.features={folder}", *MIXED)


def test_a_plan_counts_the_last_state(recipe: Path) -> None:
    def slots(*overrides: str) -> int:
        lines = make_world_plan(recipe, *overrides).memory
        return sum(line.num_bytes for line in lines if "slot" in line.name)

    assert slots(*MIXED) * 2 == slots() * 3


def test_features_that_are_not_finite_in_the_last_state_leave_the_document_out(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Target.features

    def spoiled(self: Target, batch: Any, **options: Any) -> Any:
        found = original(self, batch, **options)
        if batch.seq == 1:
            found[-1] = torch.full_like(found[-1], float("nan"))
        return found

    monkeypatch.setattr(Target, "features", spoiled)
    run_training(make_world_plan(recipe, *MIXED, "train.max_bad_fraction=1.0"))
    values = [line for line in lines(recipe.parent / "run") if "train/loss" in line]
    assert values[0]["train/bad_documents"] > 0 and all(line["train/loss"] > 0 for line in values)
