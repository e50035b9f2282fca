"""validate: the run's own metrics again, decoding without loss, and refusals that say what does not fit."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helixctl.data.store import SourceCounts, Store
from helixctl.data.store_writer import StoreWriter
from helixctl.decoding.sampling import judge_drafts
from helixctl.errors import CheckpointError, DataError, UsageError
from helixctl.training import validate
from helixctl.training.conversations import Choice
from helixctl.training.proofs import MAX_TOKENS
from helixctl.training.results import ValidationResult
from helixctl.training.validate import ValidationRequest, run_validation
from tests.chats import conversations, write_jsonl
from tests.cli.runner import Runner
from tests.data import templates
from tests.data.builders import INFO
from tests.training.conftest import TrainedWorld

LAST = "checkpoints/step-00000004"


def texts(found: ValidationResult) -> list[list[str]]:
    """Every turn's answer."""
    return [["".join(s.text for s in turn.segments) for turn in answer.turns] for answer in found.prompts]


def test_held_out_metrics_equal_those_of_the_run_bit_for_bit(trained: TrainedWorld) -> None:
    found = run_validation(trained.plan(), ValidationRequest(checkpoint=Path(trained.result.run_dir) / LAST))
    recorded = {name: value for name, value in trained.result.validation.items() if name != "val/accept_len_live"}
    assert found.held_out == recorded and found.step == 4
    assert "val/accept_len" in recorded and "val/acc_3" in recorded


def test_decoding_is_lossless_and_stands_beside_its_control(trained: TrainedWorld) -> None:
    seen: dict[str, tuple[int, int]] = {}
    found = run_validation(trained.plan(), on_progress=lambda what, done, total: seen.update({what: (done, total)}))
    (check,) = found.greedy
    assert found.lossless and (check.dtype, check.identical, check.prompts, check.noise) == ("float32", 2, 2, None)
    assert found.accept_len is not None and found.accept_len >= 1.0
    assert found.accept_len_shuffled is not None and found.accept_len_shuffled >= 1.0
    assert all(proof.passed for proof in found.proofs) and len(found.proofs) == 4
    assert all(turn.identical and turn.num_tokens <= 12 for answer in found.prompts for turn in answer.turns)
    assert [(one.num_prompts, one.num_turns, one.identical) for one in found.sources] == [(2, 2, 2)]
    assert found.total is not None and found.total.accept_len == found.accept_len
    assert found.settings is not None and found.settings.block_size == trained.plan().recipe.drafter.block_size
    assert found.plain_tokens_per_s and found.speculative_tokens_per_s
    assert [speed.batch_size for speed in found.speeds] == [1, 2]
    assert all(done == total for done, total in seen.values()) and len(seen) == 8, seen


def test_a_target_in_bfloat16_is_judged_in_float32_and_shown_in_both(trained: TrainedWorld) -> None:
    found = run_validation(trained.plan("target.dtype=bfloat16"))
    assert [check.dtype for check in found.greedy] == ["float32", "bfloat16"]
    assert found.greedy[0].identical == found.greedy[0].prompts
    assert found.lossless and all(proof.passed for proof in found.proofs)


def test_prompts_of_files_replace_the_held_out_ones_and_are_played_turn_by_turn(
    trained: TrainedWorld, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "hi"}, {"turns": ["two", "three"]}, conversations(1)[0]]
    paths = (
        write_jsonl(tmp_path / "p.jsonl", rows),
        write_jsonl(tmp_path / "q.jsonl", [{"prompt": "more", "id": "m"}]),
    )
    found = run_validation(trained.plan(), ValidationRequest(bench=paths))
    said = [[turn.prompt for turn in answer.turns] for answer in found.prompts]
    assert said == [["hi"], ["two", "three"], ["count to 0"], ["more"]]
    assert [(one.source, one.id) for one in found.prompts] == [("p", "1"), ("p", "2"), ("p", "3"), ("q", "m")]
    assert [(one.source, one.num_prompts, one.num_turns) for one in found.sources] == [("p", 3, 4), ("q", 1, 1)]
    assert found.lossless and found.greedy[0].prompts == 5
    assert found.total is not None and found.total.positions[0].judged > 0


def test_acceptance_alone_is_the_same_number_and_nothing_else(trained: TrainedWorld, tmp_path: Path) -> None:
    """What settings are chosen by, on prompts that are not scored in the end."""
    path = write_jsonl(tmp_path / "p.jsonl", [{"turns": [f"count to {i}", "again"]} for i in range(6)])
    seen: set[str] = set()
    request = ValidationRequest(bench=(path,), choice=Choice(skip=2, limit=3), acceptance_only=True, max_new_tokens=9)
    found = run_validation(trained.plan(), request, on_progress=lambda what, done, total: seen.add(what))
    assert seen == {"speculative decoding, float32"}
    assert [one.id for one in found.prompts] == ["3", "4", "5"] and found.total is not None
    assert (found.held_out, found.greedy, found.proofs, found.plain_tokens_per_s) == ({}, (), (), None)
    assert all(turn.identical is None and turn.num_tokens <= 9 for one in found.prompts for turn in one.turns)
    whole = run_validation(trained.plan(), replace(request, acceptance_only=False))
    assert whole.total is not None and whole.total.score == found.total.score
    assert whole.settings == found.settings and whole.held_out
    assert found.lossless and found.total.identical is None and whole.total.identical == 6


def test_shorter_blocks_are_lossless_too_and_are_refused_where_they_are_longer(trained: TrainedWorld) -> None:
    own = trained.plan().recipe.drafter.block_size
    found = run_validation(trained.plan(), ValidationRequest(block_size=2))
    assert found.lossless and found.settings is not None and found.settings.block_size == 2 < own
    assert found.total is not None and [p.position for p in found.total.positions] == [1]
    for wrong in (1, own + 1):
        with pytest.raises(UsageError, match=f"--block-size {wrong} is not between 2 and the drafter's own, {own}"):
            run_validation(trained.plan(), ValidationRequest(block_size=wrong))


def test_trees_are_lossless_and_say_how_many_drafts_they_verify(trained: TrainedWorld, run: Runner) -> None:
    chain = run_validation(trained.plan(), ValidationRequest(acceptance_only=True))
    done = run("validate", trained.recipe, "--tree-budget", 24, "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["greedy"][0]["identical"] == found["greedy"][0]["prompts"] == 2
    assert found["settings"]["tree_budget"] == found["total"]["verified_per_cycle"] == 24
    assert chain.settings is not None and chain.settings.tree_budget is None
    said = [["".join(s["text"] for s in turn["segments"]) for turn in one["turns"]] for one in found["prompts"]]
    assert said == texts(chain)
    assert all(proof["passed"] for proof in found["proofs"]) and len(found["proofs"]) == 4
    assert found["accept_len_shuffled"] >= 1.0 and len(found["speeds"]) == 2


def test_trees_are_refused_where_they_cannot_be(trained: TrainedWorld) -> None:
    plan = trained.plan("drafter.algorithm=dspark")
    with pytest.raises(UsageError, match="both say what is verified"):
        run_validation(plan, ValidationRequest(tree_budget=8, confidence_threshold=0.5))
    recurrent = replace(trained.plan(), target=replace(trained.plan().target, recurrent=True))
    with pytest.raises(UsageError, match=r"--tree-budget: .* cannot be decoded yet"):
        run_validation(recurrent, ValidationRequest(tree_budget=8))


def test_sampled_trees_have_the_targets_distribution(trained: TrainedWorld, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"count to {i}"} for i in range(12)])
    request = ValidationRequest(bench=(path,), temperature=1.0, max_new_tokens=40, seed=3, tree_budget=16)
    found = run_validation(trained.plan("validation.batch_size=12"), request)
    assert found.samples is not None and found.lossless and found.samples.p_value > 0.001


def test_samples_are_tested_for_the_targets_distribution(trained: TrainedWorld, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"count to {i}"} for i in range(12)])
    request = ValidationRequest(bench=(path,), temperature=1.0, max_new_tokens=40, seed=3)
    found = run_validation(trained.plan("validation.batch_size=12"), request)
    assert found.samples is not None and found.lossless and found.samples.p_value > 0.01
    assert found.samples.num_tokens == sum(one.num_tokens for one in found.prompts) > 300
    assert found.greedy == () and len(found.proofs) == 3 and found.prompts[0].turns[0].identical is None
    request = replace(request, acceptance_only=True)
    again = run_validation(trained.plan("validation.batch_size=12"), request)
    assert texts(again) == texts(found)
    assert texts(run_validation(trained.plan("validation.batch_size=12"), replace(request, seed=4))) != texts(found)
    with pytest.raises(UsageError, match="greedy decoding samples nothing"):
        run_validation(trained.plan(), ValidationRequest(top_p=0.9))


def test_a_sampler_that_keeps_too_many_drafts_fails_the_command(
    trained: TrainedWorld, run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"count to {i}"} for i in range(12)])
    monkeypatch.setattr(
        "helixctl.decoding.sampling.judge_drafts",
        lambda p, q, drafts, u, limits: judge_drafts(p, q, drafts, u * 0, limits),
    )
    done = run("validate", trained.recipe, "--bench", path, "--temperature", 1, "--max-new-tokens", 40, "--json")
    found = json.loads(done.out)
    assert done.code == 1 and found["samples"]["p_value"] < 1e-4 and all(one["passed"] for one in found["proofs"])


def test_without_prompts_there_are_metrics_and_three_proofs(trained: TrainedWorld) -> None:
    found = run_validation(trained.plan("validation.live_prompts=0"))
    assert found.held_out and found.accept_len is None and found.prompts == () and found.greedy == ()
    assert len(found.proofs) == 3


def test_json_is_all_that_stdout_holds(trained: TrainedWorld, run: Runner) -> None:
    done = run("validate", trained.recipe, "--json")
    found = json.loads(done.out)
    assert done.code == 0 and done.err == ""
    assert set(found) >= {"held_out", "accept_len", "accept_len_shuffled", "prompts", "greedy", "proofs", "checkpoint"}
    assert found["greedy"][0] == {
        "dtype": "float32",
        "prompts": 2,
        "identical": 2,
        "near_ties": 0,
        "different": 0,
        "noise": None,
    }


def test_a_decoder_that_accepts_a_wrong_token_fails_the_command(
    trained: TrainedWorld, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(drafts: Any, choices: Any, limits: Any) -> Any:
        return (choices[:, 0] * 0 + 1).clamp(max=drafts.shape[1])

    monkeypatch.setattr("helixctl.decoding.rows.accepted_drafts", trusting)
    done = run("validate", trained.recipe, "--json")
    found = json.loads(done.out)
    assert done.code == 1
    assert found["greedy"][0]["different"] == 2 and found["greedy"][0]["noise"] > 0
    assert [proof["passed"] for proof in found["proofs"]] == [True, True, True, False]
    assert not any(turn["identical"] for answer in found["prompts"] for turn in answer["turns"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("drafter.num_layers=3", r"layers\.2\..*missing"),
        ("drafter.mask_token_id=311", "another mask token"),
        ("drafter.target_layer_ids=[1, 2]", "another taps"),
    ],
)
def test_a_drafter_of_another_recipe_is_refused(trained: TrainedWorld, override: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        run_validation(trained.plan(override))
    assert caught.value.fix


def test_a_store_of_another_tokenizer_is_refused(trained: TrainedWorld, tmp_path: Path) -> None:
    other = tmp_path / "target"
    other.mkdir()
    for file in Path(trained.plan().recipe.target.model).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    templates.byte_tokenizer(templates.CHATML + " ").save_pretrained(other)
    with pytest.raises(DataError, match="another chat template than the recipe's"):
        run_validation(trained.plan(f"target.model={other}"))


@pytest.mark.parametrize("begins", [[40, 10], [900, 700]])
def test_proofs_find_a_document_even_where_all_begin_late(tmp_path: Path, begins: list[int]) -> None:
    with StoreWriter(tmp_path / "store", INFO) as writer:
        for begin in begins:
            writer.add("train", np.arange(1000) % 90 + 3, np.arange(1000) >= begin)
        source = SourceCounts("memory", "tokens", 1.0, "train", "c" * 64, 1, 2, 2)
        writer.finish([source], mask_policy="all_turns", validation_fraction=0.0)
    ids, mask = validate.proof_document(Store.open(tmp_path / "store"))
    assert len(ids) == len(mask) == (MAX_TOKENS if begins[0] < MAX_TOKENS else 700 + MAX_TOKENS // 2)
    assert any(a and b for a, b in itertools.pairwise(mask))


def test_a_float8_target_is_what_is_decoded_and_is_judged_in_float64(trained: TrainedWorld) -> None:
    found = run_validation(trained.plan("target.quantization=fp8", "target.dtype=bfloat16"))
    assert [check.dtype for check in found.greedy] == ["float64 with float8 products", "bfloat16 with float8 products"]
    assert found.greedy[0].identical == found.greedy[0].prompts
    assert all(proof.passed for proof in found.proofs) and len(found.proofs) == 4
