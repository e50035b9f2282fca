"""`helixctl runs` and `helixctl report`: what run directories tell, torn ones too, and the page in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from helixctl.errors import UsageError
from helixctl.training.report import make_page, write_report
from helixctl.training.runs import list_runs, summarise
from tests.browser import look_at, needs_browser
from tests.cli.runner import Runner
from tests.training.conftest import TrainedWorld


@pytest.fixture
def copy(trained: TrainedWorld, tmp_path: Path) -> Path:
    """A copy of the trained run that a test may damage."""
    return shutil.copytree(trained.result.run_dir, tmp_path / "runs" / "one")


def set_json(path: Path, **values: object) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | values))


def test_a_finished_run(trained: TrainedWorld, copy: Path) -> None:
    (run,) = list_runs(copy.parent)
    assert (run.dir, run.state, run.step, run.total_steps) == (str(copy), "finished", 4, 4)
    assert run.metric == "val/accept_len_live" and run.best == pytest.approx(trained.result.best_value)
    assert run.best_step == trained.result.best_step
    assert run.loss == pytest.approx(trained.result.loss) and run.tokens_per_s and run.updated_at


def test_every_state_is_told_apart(copy: Path) -> None:
    set_json(copy / "result.json", finished=False)
    assert summarise(copy).state == "stopped"
    set_json(copy / "status.json", phase="running")
    assert summarise(copy).state == "killed"
    set_json(copy / "status.json", phase="failed", error="out of memory")
    assert (summarise(copy).state, summarise(copy).error) == ("failed", "out of memory")
    (copy / "run.pid").write_text(str(os.getpid()))
    assert summarise(copy).state == "running"
    for name in ("run.pid", "status.json", "result.json", "metrics.jsonl"):
        (copy / name).unlink(missing_ok=True)
    bare = summarise(copy)
    assert (bare.state, bare.step, bare.best, bare.total_steps) == ("unknown", 0, None, 4)
    (copy / "plan.json").write_text("{ torn")
    assert summarise(copy).total_steps is None


def test_runs_are_found_at_any_depth_and_nothing_else_is(copy: Path, run: Runner) -> None:
    shutil.copytree(copy, copy.parent / "more" / "two")
    (copy.parent / "no-run").mkdir()
    (copy.parent / "no-run" / "plan.json").write_text("{}")
    assert {Path(found.dir).name for found in list_runs(copy.parent)} == {"one", "two"}
    done = run("runs", copy.parent)
    assert done.code == 0 and "finished" in done.out and "val/accept_len" in done.out and "4/4" in done.out
    assert len(json.loads(run("runs", copy.parent, "--json").out)) == 2
    assert "no runs here" in run("runs", copy.parent / "no-run").out
    with pytest.raises(UsageError, match="no folder"):
        list_runs(copy / "none")


def test_the_page_has_every_part_and_fetches_nothing(copy: Path) -> None:
    page = make_page(copy)
    for heading in ("Loss", "Acceptance length", "Right drafts by position", "Throughput", "Waits", "Recipe"):
        assert f"<h2>{heading}" in page, heading
    for heading in ("Environment", "Peak memory", "Accounting"):
        assert f"<h2>{heading}" in page, heading
    assert "algorithm: " in page and "torch" in page
    assert not re.search(r"(src|href|url)\s*[=(]", page)
    assert "<script" not in page


def test_what_a_run_wrote_is_text_not_markup(copy: Path) -> None:
    with (copy / "recipe.yaml").open("a") as file:
        file.write("# </pre><script>document.title='broken'</script>\n")
    set_json(copy / "environment.json", gpus=["<img src=x onerror=alert(1)>"])
    page = make_page(copy)
    assert "<script" not in page and "<img" not in page


def test_a_run_that_has_just_begun_has_a_page_too(copy: Path) -> None:
    for name in ("result.json", "status.json", "metrics.jsonl", "environment.json"):
        (copy / name).unlink(missing_ok=True)
    page = make_page(copy)
    assert "<h2>Recipe" in page and "<svg" not in page


def test_the_command_writes_where_it_is_told(copy: Path, run: Runner, tmp_path: Path) -> None:
    done = run("report", copy)
    assert done.code == 0 and (copy / "report.html").is_file()
    assert run("report", copy, "-o", tmp_path / "page.html").code == 0 and (tmp_path / "page.html").is_file()
    assert run("report", tmp_path).code == 2
    done = run("report", copy, "-o", tmp_path / "none" / "page.html")
    assert done.code == 2 and "--output" in done.err


@pytest.mark.slow
@needs_browser
def test_a_real_browser_draws_the_page(copy: Path, tmp_path: Path) -> None:
    write_report(copy, tmp_path / "page.html")
    seen = look_at(tmp_path / "page.html")
    assert seen["title"] == "one: finished" and seen["fits"]
    assert len(seen["charts"]) >= 6 and all(seen["charts"]), seen
