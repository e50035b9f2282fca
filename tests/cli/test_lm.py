"""Every command that takes a causal LM, as a user types it, on a tiny world."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.runner import Runner
from tests.lm_worlds import write_lm_world


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_lm_world(tmp_path)


def test_the_way_from_texts_to_an_exported_model(run: Runner, recipe: Path) -> None:
    done = run("prepare", recipe, "--show", "1")
    assert done.code == 0 and "60 documents" in done.out, done.err
    done = run("plan", recipe)
    assert done.code == 0 and "stage 1" in done.out and "goes on from the stage before" in done.out, done.err
    done = run("train", recipe, "--set", "validation.prompts=[one]", "--set", "validation.max_new_tokens=3")
    assert done.code == 0 and "val/perplexity" in done.out and "8 of 8" in done.out, done.err
    done = run("validate", recipe, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["step"] == 8 and all(proof["passed"] for proof in result["proofs"])
    done = run("validate", recipe)
    assert done.code == 0 and "passed: a packed row gives every document" in done.out, done.err
    done = run("export", recipe)
    assert done.code == 0 and "transformers" in done.out, done.err
    assert (recipe.parent / "run/export/tokenizer.json").is_file()
    done = run("runs", ".")
    assert done.code == 0 and "val/loss" in done.out
    assert run("report", "run").code == 0


def test_what_only_drafters_have_is_told(run: Runner, recipe: Path) -> None:
    for words in (["prepare", recipe, "--regenerate"], ["prepare", recipe, "--features", "f"]):
        done = run(*words)
        assert done.code == 2 and "only drafters have this" in done.err, done.err
    done = run("validate", recipe, "--bench", recipe)
    assert done.code == 2 and "are for drafters" in done.err and "validation.prompts" in done.err
    done = run("export", recipe, "--base-model", "x/y")
    assert done.code == 2 and "are for drafters" in done.err


def test_mistakes_that_the_plan_finds_get_their_place(run: Runner, recipe: Path) -> None:
    done = run("train", recipe, "--dry-run", "--set", "pipeline.trainers=[cuda:9]")
    assert done.code == 2 and "no cuda:9" in done.err


def test_nothing_is_compiled_on_a_cpu(run: Runner, recipe: Path) -> None:
    done = run("warmup-compile", recipe, "--check")
    assert done.code == 0 and "nothing is compiled" in done.out
