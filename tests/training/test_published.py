"""Published drafters, whoever wrote them, as starting points and in place of a run's own checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helixctl.checkpoint.convert import convert
from helixctl.checkpoint.store import load_checkpoint
from helixctl.errors import CheckpointError, RecipeError
from helixctl.training.commands import ExportRequest, run_export
from helixctl.training.run import run_training
from helixctl.training.validate import ValidationRequest, run_validation
from tests.checkpoint.builders import edit_config
from tests.cli.runner import Runner
from tests.training.conftest import TrainedWorld


@pytest.fixture(scope="module")
def export(trained: TrainedWorld) -> Path:
    """The trained drafter in the speculators format."""
    folder = trained.recipe.parent / "theirs"
    run_export(trained.plan(), ExportRequest(output=folder, format="speculators"))
    return folder


def test_validation_of_an_export_measures_the_same_drafter(trained: TrainedWorld, export: Path) -> None:
    own = run_validation(trained.plan())
    theirs = run_validation(trained.plan(), ValidationRequest(checkpoint=export))
    assert theirs.step == 0
    assert theirs.lossless and all(proof.passed for proof in theirs.proofs)
    assert theirs.held_out["val/loss"] == pytest.approx(own.held_out["val/loss"], rel=1e-2)  # bfloat16 weights


def test_training_starts_from_a_published_drafter(trained: TrainedWorld, export: Path, tmp_path: Path) -> None:
    start = (f"drafter.init_from={export}", f"run.dir={tmp_path / 'run'}", "train.steps=1", "train.learning_rate=1e-12")
    result = run_training(trained.plan(*start))
    assert result.checkpoint is not None
    begun = load_checkpoint(Path(result.checkpoint)).tensors["drafter"]
    best = load_checkpoint(trained_checkpoint(trained)).tensors["drafter"]
    for name, tensor in begun.items():
        assert torch.allclose(tensor, best[name].bfloat16().float(), atol=1e-9), name


def trained_checkpoint(trained: TrainedWorld) -> Path:
    return Path(trained.result.run_dir) / "checkpoints" / f"step-{trained.result.best_step:08d}"


def test_training_goes_on_better_from_a_drafter_than_from_nothing(
    trained: TrainedWorld, export: Path, tmp_path: Path
) -> None:
    losses = {}
    for name, start in (("new", []), ("from", [f"drafter.init_from={export}"])):
        result = run_training(trained.plan(*start, f"run.dir={tmp_path / name}", "train.steps=2"))
        losses[name] = result.validation["val/loss"]
    assert losses["from"] < losses["new"]


@pytest.mark.parametrize(
    ("overrides", "words", "fix"),
    [
        (["drafter.num_layers=1"], "num_layers is 2, the recipe's 1", "--set drafter.num_layers=2"),
        (["drafter.target_layer_ids=[1,2]"], r"taps is \(0, 2\)", "--set drafter.target_layer_ids=[0,2]"),
        (["drafter.rope_theta=500"], "rope_theta is 10000.0, the recipe's 500.0", "--set drafter.rope_theta=10000.0"),
    ],
)
def test_another_drafter_is_refused_with_what_to_set(
    trained: TrainedWorld, export: Path, tmp_path: Path, overrides: list[str], words: str, fix: str
) -> None:
    run_dir = f"run.dir={tmp_path / 'run'}"
    for start in (
        lambda plan: run_training(plan),
        lambda plan: run_validation(plan, ValidationRequest(checkpoint=export)),
    ):
        plan = trained.plan(*overrides, f"drafter.init_from={export}", run_dir)
        with pytest.raises(CheckpointError, match=words) as caught:
            start(plan)
        assert fix in (caught.value.fix or "")
    assert not (tmp_path / "run").exists()


def test_a_longer_block_is_free_at_the_start_only(trained: TrainedWorld, export: Path, tmp_path: Path) -> None:
    longer = ("drafter.block_size=5", f"run.dir={tmp_path / 'run'}", "train.steps=1")
    assert run_training(trained.plan(*longer, f"drafter.init_from={export}")).finished
    with pytest.raises(CheckpointError, match="block_size is 4, the recipe's 5"):
        run_validation(trained.plan(*longer), ValidationRequest(checkpoint=export))


def test_a_start_that_is_not_there_is_a_mistake_in_the_recipe(trained: TrainedWorld, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"holds no config\.json"):
        trained.plan(f"drafter.init_from={tmp_path}")
    with pytest.raises(RecipeError, match="both given"):
        trained.plan(f"drafter.init_from={tmp_path}", "drafter.init_layers=[0,1]")


def test_a_published_drafter_is_exported_and_checked_through_the_command(
    trained: TrainedWorld, export: Path, tmp_path: Path, run: Runner
) -> None:
    again = tmp_path / "again"
    assert run("export", trained.recipe, "--checkpoint", export, "--output", again).code == 0
    done = run("export", "--check", again, "--target", trained.recipe.parent / "target")
    assert done.code == 0 and "SGLang: reads it" in done.out
    assert "trained for" not in (again / "README.md").read_text()


def test_a_drafter_for_another_target_is_refused(trained: TrainedWorld, export: Path, tmp_path: Path) -> None:
    facts = trained.plan().target
    other = convert(export, tmp_path / "other", "zlab", facts=facts).dir
    edit_config(other, dflash_config__input_embedding_scale=8.0)
    with pytest.raises(CheckpointError, match=r"embedding_scale is 8\.0") as caught:
        run_validation(trained.plan(), ValidationRequest(checkpoint=other))
    assert caught.value.fix == "--set drafter.scale_embeddings=true"
