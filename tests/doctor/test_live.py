"""`doctor --live`: the proofs pass on sound parts, fail on planted faults, and failing to load is an outcome too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.doctor import live
from helixctl.doctor.probe import LIVE_IDS, Outcome
from helixctl.training import proofs
from helixctl.training.live import make_policy
from helixctl.training.results import GreedyCheck
from helixctl.training.run import run_training
from tests.chats import make_chat_world, prepare_world
from tests.training.worlds import make_world_plan


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Path:
    """A world with nothing prepared or trained."""
    return make_chat_world(tmp_path_factory.mktemp("fresh"))


def prove(recipe: Path, *overrides: str, checkpoint: Path | None = None) -> list[Outcome]:
    return list(live.prove_live(make_world_plan(recipe, *overrides), checkpoint=checkpoint))


def states(outcomes: list[Outcome]) -> str:
    return " ".join(outcome.state for outcome in outcomes)


def test_a_fresh_drafter_is_proven_before_anything_is_prepared(fresh: Path) -> None:
    found = prove(fresh)
    assert tuple(outcome.id for outcome in found) == LIVE_IDS
    assert states(found) == "ok ok ok ok ok"
    assert "a fresh drafter" in found[0].message and "random tokens" in found[0].message
    assert not (fresh.parent / "run").exists(), "a check writes nothing"


def test_a_checkpoint_is_proven_on_held_out_documents(tmp_path: Path) -> None:
    recipe = prepare_world(make_chat_world(tmp_path))
    run_training(make_world_plan(recipe))
    found = prove(recipe)
    assert states(found) == "ok ok ok ok ok"
    assert "checkpoint step-" in found[0].message and "held-out documents" in found[0].message
    assert "2 of 2 answers identical in float32" in found[4].message


def test_every_outcome_has_its_number(fresh: Path) -> None:
    _, logits, leaks, captured, _ = prove(fresh)
    assert "largest difference" in logits.message
    assert leaks.message.startswith("0 of ")
    assert "features differ by" in captured.message


def test_without_prompts_there_is_nothing_to_decode(fresh: Path) -> None:
    found = prove(fresh, "validation.live_prompts=0")
    assert states(found) == "ok ok ok ok skip" and "live_prompts" in found[4].message


def test_a_broken_proof_fails_under_its_own_name(fresh: Path, monkeypatch) -> None:
    def shifted(*arguments: Any) -> Any:
        policy: Any = make_policy(*arguments)
        draft = policy.draft_logits
        policy.draft_logits = lambda ids, positions, **how: draft(ids, positions + 1, **how)
        return policy

    monkeypatch.setattr(proofs, "make_policy", shifted)
    found = prove(fresh)
    assert states(found) == "ok fail ok ok ok"
    assert found[1].name.startswith("training and decoding") and found[1].remedy


def test_output_that_differs_fails(fresh: Path, monkeypatch) -> None:
    monkeypatch.setattr(live, "_decode", lambda *_: GreedyCheck("float32", 2, 1, 0, 1, 0.1))
    found = prove(fresh)
    assert states(found) == "ok ok ok ok fail" and "1 of 2 answers identical" in found[4].message


def test_a_missing_checkpoint_is_an_outcome(fresh: Path) -> None:
    (outcome,) = prove(fresh, checkpoint=fresh.parent / "nowhere")
    assert outcome.state == "fail" and "no checkpoint" in outcome.message and outcome.remedy


def test_a_torn_checkpoint_is_an_outcome(tmp_path: Path) -> None:
    recipe = make_chat_world(tmp_path)
    (tmp_path / "run/checkpoints/step-00000002").mkdir(parents=True)
    (outcome,) = prove(recipe)
    assert outcome.state == "fail" and outcome.id == LIVE_IDS[0]


def test_too_little_memory_is_an_outcome(fresh: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(live, "load_exact_target", full)
    (outcome,) = prove(fresh)
    assert outcome.state == "fail" and "2 GiB" in outcome.message and "float32" in str(outcome.remedy)


def test_the_command_proves_what_passes_and_skips_what_cannot(fresh: Path, run) -> None:
    done = run("doctor", "--recipe", fresh, "--live", "--json")
    assert done.code == 0, done.err
    checks = {check["id"]: check["state"] for check in json.loads(done.out)["checks"]}
    assert [checks[id] for id in LIVE_IDS] == ["ok"] * 5
    bad = run("doctor", "--recipe", fresh, "--live", "--json", "--set", "drafter.mask_token_id=9999")
    assert bad.code == 1
    checks = {check["id"]: check["state"] for check in json.loads(bad.out)["checks"]}
    assert checks == {"REC001": "fail", "LIVE000": "skip"}
