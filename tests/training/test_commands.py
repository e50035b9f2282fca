"""The main job through the command line: regenerate, prepare, train, validate, export, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helixctl.checkpoint.store import load_checkpoint
from helixctl.errors import CheckpointError, RecipeError
from helixctl.training.commands import ExportRequest, run_export, run_regeneration
from tests.chats import make_chat_world, write_jsonl
from tests.cli.runner import Runner
from tests.training.conftest import TrainedWorld
from tests.training.worlds import make_world_plan


def regenerate_option(folder: Path) -> str:
    """What to `--set`."""
    return f"data.regenerate={{prompts: {folder / 'prompts.jsonl'}, max_new_tokens: 12, batch_size: 4}}"


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data/train.jsonl").read_text().splitlines()]


def test_the_whole_job_from_prompts_to_an_export(tmp_path: Path, run: Runner) -> None:
    recipe = make_chat_world(tmp_path)
    (tmp_path / "data/train.jsonl").unlink()
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"what is {i}?"} for i in range(10)])
    for words in (
        ["prepare", recipe, "--regenerate", "--show", "1", "--set", regenerate_option(tmp_path)],
        ["train", recipe],
        ["validate", recipe, "--json"],
        ["export", recipe],
    ):
        done = run(*words)
        assert (done.code, "Traceback" in done.err) == (0, False), done.err
    assert len(answers(tmp_path)) == 10
    assert all(answer["messages"][-1]["role"] == "assistant" for answer in answers(tmp_path))
    assert (tmp_path / "run/export/model.safetensors").is_file()


def test_regeneration_goes_on_where_it_was_and_tells_how_far_it_is(tmp_path: Path) -> None:
    recipe = make_chat_world(tmp_path)
    (tmp_path / "data/train.jsonl").unlink()
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"what is {i}?"} for i in range(6)])
    seen: list[tuple[int, int]] = []
    plan = make_world_plan(recipe, regenerate_option(tmp_path))
    first = run_regeneration(plan, lambda done, total: seen.append((done, total)))
    assert (first.answered, first.resumed) == (6, 0)
    assert seen[-1] == (6, 6) and seen == sorted(seen)
    prompts.write_text(prompts.read_text() + '{"prompt": "one more"}\n{"prompt": "one more"}\n')
    second = run_regeneration(plan)
    assert (second.answered, second.resumed, second.duplicates) == (1, 6, 1)


def test_regeneration_needs_prompts_and_a_place_for_chats(tmp_path: Path) -> None:
    recipe = make_chat_world(tmp_path)
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "x"}])
    as_text = f"data.train=[{{path: {tmp_path / 'data/train.jsonl'}, format: text}}]"
    for overrides, key in (([], "data.regenerate.prompts"), ([regenerate_option(tmp_path), as_text], "data.train")):
        with pytest.raises(RecipeError) as caught:
            run_regeneration(make_world_plan(recipe, *overrides))
        assert caught.value.problems[0].key.startswith(key) and caught.value.problems[0].fix


def test_prompts_that_are_not_there_are_named_before_the_target_is_loaded(
    tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_chat_world(tmp_path)
    before = (tmp_path / "data/train.jsonl").read_text()
    monkeypatch.setattr("helixctl.training.commands.load_target", None)
    done = run("prepare", recipe, "--regenerate", "--set", regenerate_option(tmp_path))
    assert done.code == 1 and "prompts.jsonl" in done.err and "fix:" in done.err
    assert (tmp_path / "data/train.jsonl").read_text() == before


def test_export_takes_the_best_checkpoint_and_the_run_folder_unless_told(trained: TrainedWorld, tmp_path: Path) -> None:
    run_dir = Path(trained.result.run_dir)
    best = run_dir / "checkpoints" / f"step-{trained.result.best_step:08d}"
    default = run_export(trained.plan())
    request = ExportRequest(run_dir / "checkpoints/step-00000004", tmp_path / "deep" / "out")
    given = run_export(trained.plan(), request)
    for result, folder, checkpoint in (
        (default, run_dir / "export", best),
        (given, tmp_path / "deep" / "out", run_dir / "checkpoints/step-00000004"),
    ):
        assert Path(result.dir) == folder
        written = load_file(folder / "model.safetensors")
        trained_tensors = load_checkpoint(checkpoint).tensors["drafter"]
        assert written.keys() == trained_tensors.keys()
        assert all(torch.equal(written[name], trained_tensors[name].bfloat16()) for name in written)
        assert set(result.commands) == {"vLLM", "SGLang"}
    assert "val/accept_len" in (run_dir / "export" / "README.md").read_text()


def test_an_export_may_be_repeated_and_never_replaces_other_files(
    trained: TrainedWorld, tmp_path: Path, run: Runner
) -> None:
    assert run("export", trained.recipe, "--output", tmp_path / "out").code == 0
    assert run("export", trained.recipe, "--output", tmp_path / "out").code == 0
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("x")
    done = run("export", trained.recipe, "--output", tmp_path / "thesis")
    assert done.code in (1, 2) and "thesis" in done.err and "fix:" in done.err
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["thesis.tex"]


def test_a_drafter_of_another_recipe_is_not_exported(trained: TrainedWorld, tmp_path: Path) -> None:
    for override, words in (("drafter.num_layers=1", "unknown"), ("drafter.mask_token_id=311", "another mask token")):
        with pytest.raises(CheckpointError, match=words):
            run_export(trained.plan(override), ExportRequest(output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
