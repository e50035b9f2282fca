"""`profile` on the command line: whole profiles of a tiny run, of a synthetic one, and all ways to use it wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixctl.profiling.runs import Run
from tests.chats import make_chat_world, prepare_world
from tests.engine.threads import until
from tests.profiling.subjects import python, synthetic


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared tiny recipe that validates and saves seldom."""
    path = prepare_world(make_chat_world(tmp_path_factory.mktemp("world")))
    path.write_text(path.read_text(encoding="utf-8").replace("every_steps: 2", "every_steps: 1000"), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_recipe_is_run_profiled_and_leaves_the_run_directory_alone(recipe, run, tmp_path):
    run_dir = recipe.parent / "run"
    (run_dir / "checkpoints" / "step-00000001").mkdir(parents=True)
    before = sorted(run_dir.rglob("*"))
    done = run("profile", recipe, "--steps", 40, "--cuda", "--output", tmp_path / "out")
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 100 or "written:" in done.out
    assert "VERDICT" in done.out and "drafter-0" in done.out and "left out: set-up" in done.out
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert "the run uses no GPU" in " ".join(done.out.split()) and "no GPU" in report["cuda"]["problem"]
    assert report["about"]["mode"] == "recipe"
    assert report["pipeline"]["steps_per_s"] > 0
    assert {"reader-0", "target-0", "target-0-post", "drafter-0"} <= {stage["name"] for stage in report["stages"]}
    assert sorted(run_dir.rglob("*")) == before
    assert not (tmp_path / "out" / ".run").exists()


@pytest.mark.slow
def test_a_run_that_cannot_start_is_told_with_its_own_words_and_code(recipe, run, tmp_path):
    done = run("profile", recipe, "--seconds", 2, "--set", f"data.store={tmp_path / 'none'}", "-o", tmp_path / "out")
    assert done.code in (1, 2)
    assert "none" in done.err and "prepare" in done.err


def test_a_mistake_in_the_recipe_is_told_before_anything_starts(recipe, run, tmp_path):
    done = run("profile", recipe, "--set", "train.stpes=3")
    assert done.code == 2
    assert "train.stpes" in done.err


def test_a_process_by_its_number(run, tmp_path):
    with synthetic("slow-reader", 3, tmp_path / "run") as child:
        until(lambda: (tmp_path / "run" / "status.json").exists())
        done = run("profile", "--pid", child.pid, "--seconds", 1, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    assert "INCONCLUSIVE" in done.out and "loader-bound" in done.out
    assert (tmp_path / "out" / "profile.html").exists()


def test_any_python_process_and_json(run, tmp_path):
    with python("import threading; print(1); threading.Event().wait()") as child:
        done = run("profile", "--pid", child.pid, "--seconds", 1, "--stacks-rate", 0, "-o", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["pipeline"] is None


def test_a_stage_that_dies_is_exit_code_1(run, tmp_path):
    with synthetic("dies", 3, tmp_path / "run") as child:
        until(lambda: (tmp_path / "run" / "status.json").exists())
        done = run("profile", "--pid", child.pid, "--seconds", 10, "--output", tmp_path / "out")
    assert done.code == 1, done.err
    assert "dead stage" in done.out and "KeyError" in done.out


def test_the_thread_table_of_the_only_run(run, tmp_path, monkeypatch):
    with synthetic("balanced", 3, tmp_path / "run") as child:
        until(lambda: (tmp_path / "run" / "status.json").exists())
        one = Run(child.pid, tmp_path / "run", "helixctl train x")
        monkeypatch.setattr("helixctl.profiling.runs.find_runs", lambda root: (one,))
        done = run("profile", "--threads", "--seconds", 1)
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 100
    assert "target-0-post" in done.out and "vol/s" in done.out and "VERDICT" not in done.out


@pytest.mark.parametrize("count", [0, 2])
def test_none_or_several_runs_are_listed(count, run, tmp_path, monkeypatch):
    runs = tuple(Run(40 + i, tmp_path / str(i), "helixctl train x") for i in range(count))
    monkeypatch.setattr("helixctl.profiling.runs.find_runs", lambda root: runs)
    done = run("profile", "--threads")
    assert done.code == 2
    assert all(str(one.pid) in done.err for one in runs)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("recipe.yaml", "--pid", 1), "exclude each other"),
        (("--seconds", 3, "--steps", 3), "exclude each other"),
        (("--set", "a=b"), "needs a recipe"),
        (("--live",), "needs a terminal"),
        (("--pid", 1, "--cuda"), "--cuda needs a recipe"),
        (("--cuda",), "--cuda needs a recipe"),
        (("--run-dir", "x"), "needs --pid"),
        (("--pid", 2**22 + 1), "no process"),
        (("--compare", "a", "b"), "cannot be read as a report"),
        (("--compare", "a", "b", "--pid", 1), "stands alone"),
    ],
)
def test_wrong_use_says_so(words, text, run):
    done = run("profile", *words)
    assert done.code == 2
    assert text in done.err


def test_two_reports_side_by_side(run, tmp_path):
    with synthetic("slow-drafter", 3, tmp_path / "run") as child:
        until(lambda: (tmp_path / "run" / "status.json").exists())
        assert run("profile", "--pid", child.pid, "--seconds", 1, "-o", tmp_path / "out").code == 0
    done = run("profile", "--compare", tmp_path / "out", tmp_path / "out" / "report.json")
    assert done.code == 0, done.err
    assert "1.00x" in done.out and "tokens_per_s" in done.out
