"""Stand-ins for the libraries of optional sinks: they remember what they were told."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class FakeRun:
    """A run of wandb or trackio."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


class FakeService:
    """wandb and trackio: `init` gives a run."""

    def __init__(self) -> None:
        self.runs: list[FakeRun] = []

    def init(self, **options: Any) -> FakeRun:
        self.runs.append(FakeRun(options))
        return self.runs[-1]


class FakeMlflow:
    """MLflow's client, and the server behind it."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.made: list[str] = []
        self.batches: list[tuple[str, list[Any]]] = []
        self.ended: list[str] = []
        self.places: list[str] = []

    def MlflowClient(self, tracking_uri: str) -> FakeMlflow:
        self.places.append(tracking_uri)
        return self

    @property
    def entities(self) -> SimpleNamespace:
        return SimpleNamespace(Metric=lambda *values: values)

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        found = self.experiments.get(name)
        return None if found is None else SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, f"e{len(self.experiments)}")

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        self.made.append(f"{experiment}/{run_name}/{len(self.made)}")
        return SimpleNamespace(info=SimpleNamespace(run_id=self.made[-1]))

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        self.batches.append((run_id, metrics))

    def set_terminated(self, run_id: str) -> None:
        self.ended.append(run_id)


FAKES: dict[str, Any] = {"wandb": FakeService, "trackio": FakeService, "mlflow": FakeMlflow}


def install_fake(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Make `import name` find a fake; returns it."""
    fake = FAKES[name]()
    module = ModuleType(name)
    for attribute in dir(fake):
        if not attribute.startswith("_"):
            setattr(module, attribute, getattr(fake, attribute))
    monkeypatch.setitem(sys.modules, name, module)
    return fake
