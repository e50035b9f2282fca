"""Sinks of optional libraries, against stand-ins: lazily imported, resumed in place, never the end of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helixctl.errors import UsageError
from helixctl.metrics.sink import open_sinks
from helixctl.metrics.sinks import mlflow, trackio, wandb
from tests.metrics.fakes import FAKES, install_fake


@pytest.mark.parametrize("name", FAKES)
def test_nothing_is_imported_before_it_is_used(name: str) -> None:
    code = f"import sys, helixctl.metrics.sinks.{name}; sys.exit({name!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", FAKES)
def test_a_missing_library_says_how_to_install_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as caught:
        open_sinks(["jsonl", name], tmp_path, 10)
    assert f"pip install 'helixctl[{name}]'" in (caught.value.fix or "")


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    fake = install_fake(monkeypatch, "wandb")
    for resume_step in (None, 4, None):
        sink = wandb.open_sink(tmp_path / "run", 10, resume_step)
        sink.write(5, {"train/loss": 1.5})
        sink.close()
    first, second, third = fake.runs
    assert first.options["id"] == second.options["id"] != third.options["id"]
    assert (first.options["project"], first.options["name"], first.options["resume"]) == ("helixctl", "run", "allow")
    assert first.logged == [(5, {"train/loss": 1.5})] and first.finished


def test_trackio_resumes_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch, "trackio")
    for resume_step in (None, 4):
        sink = trackio.open_sink(tmp_path / "run", 10, resume_step)
        sink.write(5, {"val/loss": 2.0})
        sink.close()
    assert [run.options["resume"] for run in fake.runs] == ["never", "allow"]
    assert {run.options["name"] for run in fake.runs} == {"run"}
    assert fake.runs[1].logged == [(5, {"val/loss": 2.0})] and fake.runs[1].finished


def test_mlflow_logs_a_step_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    fake = install_fake(monkeypatch, "mlflow")
    for resume_step in (None, 4):
        sink = mlflow.open_sink(tmp_path / "run", 10, resume_step)
        sink.write(5, {"train/loss": 1.5, "train/accuracy": 0.25})
        sink.close()
    assert fake.made == ["e0/run/0"]
    assert [run for run, _ in fake.batches] == fake.ended == ["e0/run/0"] * 2
    (loss, accuracy) = fake.batches[0][1]
    assert (loss[0], loss[1], loss[3]) == ("train/loss", 1.5, 5) and accuracy[0] == "train/accuracy"
    assert fake.places[0] == f"sqlite:///{(tmp_path / 'run' / 'mlflow.db').resolve()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    mlflow.open_sink(tmp_path / "other", 10)
    assert fake.places[-1] == "http://tracking.example" and fake.experiments == {"helixctl": "e0"}


def test_a_service_that_fails_is_counted_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_fake(monkeypatch, "wandb")
    group = open_sinks(["wandb", "jsonl"], tmp_path, 10)

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(fake.runs[0], "log", fail)
    for step in (1, 2):
        group.write(step, {"train/loss": 1.0})
    group.close()
    assert group.failures == {"wandb": 2, "jsonl": 0}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
