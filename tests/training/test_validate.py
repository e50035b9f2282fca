"""validate: the run's own metrics again, decoding without loss, and refusals that say what does not fit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helixctl.data.store import SourceCounts, Store
from helixctl.data.store_writer import StoreWriter
from helixctl.decoding.decoded import Decoded
from helixctl.errors import CheckpointError, DataError
from helixctl.training import validate
from helixctl.training.proofs import MAX_TOKENS
from helixctl.training.validate import run_validation
from tests.chats import conversations, write_jsonl
from tests.cli.runner import Runner
from tests.data import templates
from tests.data.builders import INFO
from tests.training.conftest import TrainedWorld

LAST = "checkpoints/step-00000004"


def test_held_out_metrics_equal_those_of_the_run_bit_for_bit(trained: TrainedWorld) -> None:
    found = run_validation(trained.plan(), checkpoint=Path(trained.result.run_dir) / LAST)
    recorded = {name: value for name, value in trained.result.validation.items() if name.startswith("val/")}
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
    assert all(answer.identical and answer.num_tokens <= 12 for answer in found.prompts)
    assert found.plain_tokens_per_s and found.speculative_tokens_per_s
    assert all(done == total for done, total in seen.values()) and len(seen) == 6, seen


def test_a_target_in_bfloat16_is_judged_in_float32_and_shown_in_both(trained: TrainedWorld) -> None:
    found = run_validation(trained.plan("target.dtype=bfloat16"))
    assert [check.dtype for check in found.greedy] == ["float32", "bfloat16"]
    assert found.greedy[0].identical == found.greedy[0].prompts
    assert found.lossless and all(proof.passed for proof in found.proofs)


def test_prompts_of_a_file_replace_the_held_out_ones(trained: TrainedWorld, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "hi"}, {"turns": ["two", "three"]}, conversations(1)[0]]
    found = run_validation(trained.plan(), prompts=write_jsonl(tmp_path / "p.jsonl", rows))
    assert [answer.prompt for answer in found.prompts] == ["hi", "two", "count to 0"]


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
    def trusting(drafts: Any, choices: Any) -> Any:
        return (choices[:, 0] * 0 + 1).clamp(max=drafts.shape[1])

    monkeypatch.setattr("helixctl.decoding.rows.accepted_drafts", trusting)
    done = run("validate", trained.recipe, "--json")
    found = json.loads(done.out)
    assert done.code == 1
    assert found["greedy"][0]["different"] == 2 and found["greedy"][0]["noise"] > 0
    assert [proof["passed"] for proof in found["proofs"]] == [True, True, True, False]
    assert not any(answer["identical"] for answer in found["prompts"])


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
    with pytest.raises(DataError, match="another chat template than the target's"):
        run_validation(trained.plan(f"target.model={other}"))


def test_pieces_of_one_character_are_shown_together() -> None:
    tokenizer = templates.byte_tokenizer()
    ids = tuple(tokenizer.encode("aé!", add_special_tokens=False))
    assert len(ids) == 4
    decoded = Decoded(prompt_ids=(1,), tokens=ids, accepted=(3,), finish="length", last_is_bonus=True)
    assert [(s.text, s.kind) for s in validate._segments(tokenizer, decoded)] == [
        ("a", "prefill"),
        ("é", "draft"),
        ("!", "bonus"),
    ]
    cut = Decoded(prompt_ids=(1,), tokens=ids[:2], accepted=(1,), finish="length")
    assert [s.text for s in validate._segments(tokenizer, cut)] == ["a", "\ufffd"]


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
