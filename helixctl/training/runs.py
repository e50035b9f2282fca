"""``helixctl runs``: what runs there are, and how each stands. Never imports torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from helixctl.errors import UsageError
from helixctl.metrics import names
from helixctl.metrics.history import History, read_history

State = Literal["running", "finished", "stopped", "failed", "killed", "unknown"]
_FILES = ("plan.json", "recipe.yaml")
"""What every run directory has from its first second."""


@dataclass(frozen=True)
class RunSummary:
    """One run as its directory tells it."""

    dir: str
    state: State
    step: int
    total_steps: int | None
    metric: str
    """What chooses its best checkpoint."""
    best: float | None
    best_step: int | None
    loss: float | None
    tokens_per_s: float | None
    updated_at: float | None
    """Unix seconds of the last metrics."""
    error: str | None = None
    """Why it failed."""


def list_runs(root: Path) -> list[RunSummary]:
    """Every run at or below ``root``, the newest first.

    Raises:
        UsageError: there is no such folder.
    """
    if not root.is_dir():
        raise UsageError(f"there is no folder {root}", fix="name the folder that holds the runs: helixctl runs FOLDER")
    found = [summarise(folder) for folder in _run_dirs(root)]
    return sorted(found, key=lambda run: run.updated_at or 0.0, reverse=True)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's directory."""
    return all((folder / name).is_file() for name in _FILES)


def summarise(run_dir: Path) -> RunSummary:
    """How one run stands."""
    plan, result, status = (read_json(run_dir / f"{name}.json") for name in ("plan", "result", "status"))
    history = read_history(run_dir)
    wanted = str(((plan.get("recipe") or {}).get("checkpoint") or {}).get("best") or "auto")
    metric = names.best_metric(wanted, history.curves)
    best, best_step = _best(history, metric)
    counters = status.get("counters") or {}
    steps = [step for curve in history.curves.values() for step, _ in curve[-1:]]
    return RunSummary(
        dir=str(run_dir),
        state=_state(run_dir, result, status),
        step=max([*steps, int(counters.get("step") or 0), int(result.get("steps") or 0)]),
        total_steps=plan.get("total_steps"),
        metric=metric,
        best=best,
        best_step=best_step,
        loss=history.last(names.TRAIN_LOSS),
        tokens_per_s=history.last(names.PERF_TOKENS_PER_S),
        updated_at=history.updated_at,
        error=status.get("error"),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none or it cannot be read: a look at runs never fails on one of them."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _run_dirs(root: Path) -> list[Path]:
    below = {path.parent for path in root.rglob(_FILES[0])}
    return [folder for folder in sorted({root, *below}) if is_run(folder)]


def _best(history: History, metric: str) -> tuple[float | None, int | None]:
    curve = history.finite(metric)
    if not curve:
        return None, None
    choose = max if names.larger_is_better(metric) else min
    step, value = choose(curve, key=lambda point: point[1])
    return value, step


def _state(run_dir: Path, result: dict[str, Any], status: dict[str, Any]) -> State:
    if _is_alive(run_dir):
        return "running"
    if status.get("phase") == "failed":
        return "failed"
    if status.get("phase") == "running":
        return "killed"
    if "finished" in result:
        return "finished" if result["finished"] else "stopped"
    return "unknown"


def _is_alive(run_dir: Path) -> bool:
    try:
        return psutil.pid_exists(int((run_dir / "run.pid").read_text(encoding="ascii")))
    except (OSError, ValueError):
        return False
