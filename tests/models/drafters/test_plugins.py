"""Every drafter algorithm from end to end on a tiny target: planned, trained, decoded, exported, started from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from helixctl.checkpoint.check import check_published
from helixctl.checkpoint.convert import convert
from helixctl.checkpoint.published import default_format, formats_of, open_published
from helixctl.checkpoint.store import load_checkpoint
from helixctl.errors import UsageError
from helixctl.models.drafters._memory import Work
from helixctl.plan import Plan
from helixctl.plugins import DRAFTERS, load_plugin, plugin_names
from helixctl.training.build import build_drafter
from helixctl.training.commands import ExportRequest, run_export
from helixctl.training.results import TrainResult
from helixctl.training.run import run_training
from helixctl.training.validate import ValidationRequest, run_validation
from tests.chats import make_chat_world, prepare_world
from tests.training.worlds import make_world_plan, tensors_equal

STEPS = 6


@dataclass(frozen=True)
class Made:
    """A trained drafter and its export."""

    algorithm: str
    recipe: Path
    result: TrainResult
    export: Path

    def plan(self, *overrides: str) -> Plan:
        return make_world_plan(self.recipe, f"drafter.algorithm={self.algorithm}", f"train.steps={STEPS}", *overrides)


@pytest.fixture(scope="module", params=plugin_names(DRAFTERS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    recipe = prepare_world(make_chat_world(tmp_path_factory.mktemp(request.param)))
    plan = make_world_plan(recipe, f"drafter.algorithm={request.param}", f"train.steps={STEPS}")
    result = run_training(plan)
    export = recipe.parent / "export"
    run_export(plan, ExportRequest(output=export))
    return Made(request.param, recipe, result, export)


def validation_losses(made: Made) -> dict[int, float]:
    """By step."""
    lines = [json.loads(line) for line in (Path(made.result.run_dir) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}


def test_it_trains_and_learns(made: Made) -> None:
    assert made.result.finished and made.result.steps == STEPS
    losses = validation_losses(made)
    assert losses[STEPS] < losses[2]


def test_plan_and_model_agree_on_every_tensor(made: Made) -> None:
    plan = made.plan()
    published = load_plugin(DRAFTERS, made.algorithm, "published")
    described = published.describe(plan.recipe.drafter, plan.target, plan.target_layer_ids, None)
    own = {name: tuple(t.shape) for name, t in build_drafter(plan, torch.device("cpu")).state_dict().items()}
    assert own == published.tensor_shapes(described)
    assert plan.parameters == sum(torch.Size(shape).numel() for shape in own.values())
    options = load_plugin(DRAFTERS, made.algorithm, "options")
    small, large = (options.step_bytes(plan.recipe.drafter, plan.target, Work(n, 64, 4, False)) for n in (1, 2))
    assert 0 < small.kept < large.kept
    assert plan.last_hidden == options.needs_last_hidden(plan.recipe.drafter)


def test_decoding_is_lossless_and_every_proof_holds(made: Made) -> None:
    found = run_validation(made.plan())
    assert found.lossless and found.prompts
    assert [proof.name for proof in found.proofs if not proof.passed] == []
    assert found.held_out["val/loss"] == pytest.approx(validation_losses(made)[found.step], rel=1e-4)


def test_blocks_are_cut_where_it_expects_less_and_it_is_refused_where_it_expects_nothing(made: Made) -> None:
    refusal = f"this {made.algorithm} drafter does not learn how sure it is"
    if not made.plan().recipe.drafter.tells_confidence:
        with pytest.raises(UsageError, match=refusal):
            run_validation(made.plan(), ValidationRequest(confidence_threshold=0.5))
        return
    with pytest.raises(UsageError, match=refusal):
        run_validation(made.plan("drafter.loss.confidence=0"), ValidationRequest(confidence_threshold=0.5))
    whole = run_validation(made.plan(), ValidationRequest(confidence_threshold=0.0, acceptance_only=True))
    cut = run_validation(made.plan(), ValidationRequest(confidence_threshold=0.5))
    assert cut.lossless and whole.total is not None and cut.total is not None and whole.confidence is not None
    assert (cut.total.verified_per_cycle or 0.0) < (whole.total.verified_per_cycle or 0.0)
    assert whole.confidence.survival.num_drafts == sum(p.judged for p in whole.total.positions)
    plain = run_validation(made.plan(), ValidationRequest(acceptance_only=True))
    assert plain.confidence is None and plain.accept_len == whole.accept_len


def test_its_export_is_recognised_and_sound(made: Made) -> None:
    found = open_published(made.export)
    assert (found.algorithm, found.format) == (made.algorithm, default_format(made.algorithm))
    checked = check_published(made.export, made.plan().target)
    assert checked.sound
    assert not [finding for finding in checked.findings if finding.severity == "error" and not finding.engines]


def test_a_run_starts_from_the_export_with_nothing_but_its_folder(made: Made, tmp_path: Path) -> None:
    start = f"drafter={{algorithm: {made.algorithm}, init_from: {made.export}, num_anchors: 8}}"
    plan = make_world_plan(made.recipe, start, f"run.dir={tmp_path}/run", "train.steps=1", "train.learning_rate=1e-12")
    own, given = made.plan().recipe.drafter, plan.recipe.drafter
    assert (given.block_size, given.mask_token_id, given.num_layers) == (own.block_size, own.mask_token_id, 2)
    result = run_training(plan)
    assert result.checkpoint is not None
    begun = load_checkpoint(Path(result.checkpoint)).tensors["drafter"]
    for name, tensor in open_published(made.export).load_tensors().items():
        assert torch.allclose(begun[name], tensor.float(), atol=1e-9), name


def test_every_format_can_be_written_and_comes_back(made: Made, tmp_path: Path) -> None:
    target = made.plan().target
    for name in formats_of(made.algorithm):
        written = convert(made.export, tmp_path / name, name, target="org/target", facts=target)
        assert written.max_logit_diff == 0.0
        again = open_published(written.dir)
        assert (again.algorithm, again.format) == (made.algorithm, name)
        assert tensors_equal(again.load_tensors(), open_published(made.export).load_tensors())
        assert all(str(written.dir) in command for command in written.commands.values())
