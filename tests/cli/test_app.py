"""Commands: exit codes, messages, what is printed where, and that a look writes nothing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from helixctl.training.results import GreedyCheck, Proof, TrainResult, ValidationResult
from helixctl.version import __version__

TRAINED = TrainResult(
    run_dir="run",
    finished=True,
    steps=100,
    total_steps=100,
    tokens_per_s=1234.5,
    train_seconds=10.0,
    loss=2.5,
    validation={"val/loss": 2.25},
    best_value=None,
    best_step=None,
    checkpoint="run/checkpoints/100",
    peak_memory_bytes={"cpu": 3 << 30},
    accounting={"trained": 7},
    pipeline={},
)
VALIDATED = ValidationResult(
    checkpoint="c",
    step=1,
    held_out={"val/loss": 2.0},
    accept_len=None,
    accept_len_shuffled=None,
    prompts=(),
    greedy=(),
    plain_tokens_per_s=None,
    speculative_tokens_per_s=None,
    proofs=(),
)


@dataclass(frozen=True)
class Exported:
    dir: Path
    bytes: int
    commands: dict[str, str]


def fake_module(monkeypatch, name: str, **functions: object) -> None:
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def test_version_and_help(run):
    assert run("--version").out == f"helixctl {__version__}\n"
    done = run("--help")
    assert done.code == 0
    assert all(command in done.out for command in ("train", "validate", "prepare", "export", "plan", "init", "recipe"))


def test_no_command_is_help_and_wrong_use(run):
    assert run().code == 2


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "--dry-rn", "x"], "--dry-run"),
        (["train"], "Missing argument 'RECIPE'"),
        (["prepare", "x", "--show", "-1"], "than or equal to 0"),
    ],
)
def test_typing_mistakes_get_a_hint(run, words, hint):
    done = run(*words)
    assert done.code == 2
    assert hint in done.err


@pytest.mark.parametrize("command", ["train", "validate", "prepare", "export", "plan"])
def test_every_command_refuses_a_missing_recipe(run, tmp_path, command):
    done = run(command, tmp_path / "no.yaml")
    assert done.code == 2
    assert f"{tmp_path / 'no.yaml'}" in done.err
    assert "there is no such file" in done.err
    assert "fix: " in done.err


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("  seq_len: 64", "  seq_length: 64", 9, "did you mean 'seq_len'?"),
        ("mask_token_id: 310", "mask_token_id: 2", 15, "the target's end-of-text token"),
        ("mask_token_id: 310", "mask_token_id: 320", 15, "embedding has 320 rows"),
        ("num_layers: 2", "target_layer_ids: [2, 9]", 12, "the target's layers are 0 to 5"),
        ("steps: 100", "steps: 100\n  epochs: 1", 17, "train.epochs is given too"),
    ],
)
def test_a_mistake_ends_with_place_and_fix(run, recipe, old, new, line, words):
    recipe.write_text(recipe.read_text().replace(old, new), encoding="utf-8")
    done = run("train", recipe)
    assert done.code == 2
    assert f"{recipe}:{line}  " in done.err
    assert words in done.err
    assert "fix: " in done.err
    assert "Traceback" not in done.err


def test_several_mistakes_are_told_together(run, recipe):
    text = recipe.read_text().replace("mask_token_id: 310", "mask_token_id: 2").replace("num_layers: 2", "num_taps: 7")
    recipe.write_text(text, encoding="utf-8")
    done = run("plan", recipe, "--set", "pipeline.targets=[cuda:9]")
    assert "3 mistakes in the recipe" in done.err
    assert f"{recipe}:15" in done.err and f"{recipe}:12" in done.err
    assert "--set pipeline.targets=[cuda:9]" in done.err


def test_plan_and_dry_run_show_the_same_and_write_nothing(run, recipe, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    planned, dry = run("plan", recipe), run("train", recipe, "--dry-run")
    assert planned.code == dry.code == 0
    assert planned.out == dry.out
    assert sorted(tmp_path.rglob("*")) == before
    assert "taps       1, 3" in planned.out
    assert "run `helixctl prepare` first" in planned.err
    assert max(len(line) for line in planned.out.splitlines()) <= 100


def test_plan_as_json(run, recipe):
    content = json.loads(run("plan", recipe, "--json", "--set", "train.steps=7").out)
    assert content["total_steps"] == 7
    assert content["recipe"]["train"]["steps"] == 7
    assert content["target"]["hidden_size"] == 64
    assert "raw" not in content["target"]


def test_plan_for_a_target_that_is_elsewhere(run, recipe, model):
    config = model / "config.json"
    done = run("plan", recipe, "--set", "target.model=org/name", "--target-config", config)
    assert done.code == 0
    done = run("plan", recipe, "--target-config", config.with_name("none.json"))
    assert done.code == 2
    assert "--target-config: there is no" in done.err


def test_recipe_schema_is_json(run):
    assert len(json.loads(run("recipe", "schema").out)["oneOf"]) == 2


def test_train_gets_the_plan_and_shows_the_result(run, recipe, monkeypatch):
    calls = []

    def run_training(plan, *, resume):
        calls.append((plan.total_steps, resume))
        return TRAINED

    fake_module(monkeypatch, "helixctl.training.run", run_training=run_training)
    done = run("train", recipe, "--resume", "--set", "train.steps=5")
    assert done.code == 0
    assert calls == [(5, True)]
    assert "training finished" in done.out
    assert "3.0 GiB" in done.out
    assert "val/loss" in done.out


@pytest.mark.parametrize(("different", "passed", "code"), [(0, True, 0), (1, True, 1), (0, False, 1)])
def test_validate_fails_when_a_proof_or_losslessness_does(run, recipe, monkeypatch, different, passed, code):
    greedy = (GreedyCheck("float32", 4, 4 - different, 0, different, 0.1),)
    result = replace(VALIDATED, greedy=greedy, proofs=(Proof("no leak", passed, "bit for bit"),))
    fake_module(
        monkeypatch, "helixctl.training.validate", run_validation=lambda *_, **__: result, ValidationRequest=dict
    )
    assert run("validate", recipe).code == code
    done = run("validate", recipe, "--json")
    assert done.code == code
    assert json.loads(done.out)["greedy"][0]["different"] == different


def test_validate_refuses_files_that_are_not_there(run, recipe, tmp_path):
    for option in ("--checkpoint", "--bench"):
        done = run("validate", recipe, option, tmp_path / "none")
        assert done.code == 2
        assert f"{option}: there is no" in done.err


def test_export_passes_its_options_on(run, recipe, monkeypatch, tmp_path):
    calls = []

    def run_export(plan, request):
        calls.append(request)
        return Exported(tmp_path / "out", 2048, {"engine": "serve --with drafter"})

    fake_module(monkeypatch, "helixctl.training.commands", run_export=run_export, ExportRequest=lambda *asked: asked)
    done = run("export", recipe, "--output", tmp_path / "out", "--checkpoint", tmp_path, "--license", "mit")
    assert done.code == 0
    assert calls == [(tmp_path, tmp_path / "out", None, None, "mit")]
    assert "serve --with drafter" in done.out
    assert "2.0 KiB" in done.out


def test_prepare_regenerates_first_when_asked(run, recipe, monkeypatch):
    order = []

    def run_regeneration(plan, on_progress):
        on_progress(1, 3)
        order.append("regenerate")
        return {"answered": 3}

    def prepare(loaded, *, on_progress):
        order.append("prepare")
        raise KeyboardInterrupt

    fake_module(monkeypatch, "helixctl.training.commands", run_regeneration=run_regeneration)
    fake_module(monkeypatch, "helixctl.data.prepare", prepare=prepare, samples=lambda *_: [])
    done = run("prepare", recipe, "--regenerate")
    assert order == ["regenerate", "prepare"]
    assert "answered" in done.out
    assert done.code == 130


def test_completion_knows_the_commands():
    environment = {**os.environ, "_HELIXCTL_COMPLETE": "complete_bash", "COMP_WORDS": "helixctl va", "COMP_CWORD": "1"}
    done = python("-m", "helixctl", env=environment)
    assert done.stdout.split() == ["validate"]


def test_help_is_quick():
    def cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    times = []
    for _ in range(2):
        before = cpu_s()
        python("-m", "helixctl", "--help")
        times.append(cpu_s() - before)
    assert min(times) < 0.5  # processor time: other processes of a busy machine do not count


def python(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent.parent
    return subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, timeout=60)
