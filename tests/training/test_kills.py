"""kill -9 at random moments, again and again, and with other targets and readers each time: the run is the same run."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helixctl.checkpoint.store import latest_checkpoint, load_checkpoint
from tests.fork_server import ForkServer, fork_server
from tests.reliability.harness import metrics
from tests.training.worlds import make_world, tensors_equal

KILLS = 50
STEPS = 60
"""10 epochs of 6 rows, a validation pass in and between epochs, and more than one life can train."""
SETTINGS = (
    f"train.steps={STEPS}",
    "train.log_every_steps=1",
    "validation.every_steps=7",
    "checkpoint.every_steps=4",
    "pipeline.threads=1",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as running:
        yield running


def arguments(recipe: Path, name: str, *more: str) -> list[str]:
    values = [f"run.dir={recipe.parent / name}", *SETTINGS, *more]
    return ["train", str(recipe), "--resume", *(word for value in values for word in ("--set", value))]


def live(server: ForkServer, recipe: Path, words: list[str], life_s: float) -> int:
    """Train for ``life_s`` at most; the exit code."""
    child = server.start(words, recipe.parent / "logs")
    if not child.ended_within(life_s):
        child.send(signal.SIGKILL)
    code = child.wait()
    assert code in (0, -signal.SIGKILL), child.output
    return code


@pytest.mark.timeout(600)
def test_fifty_kills_change_nothing(server: ForkServer, tmp_path: Path) -> None:
    recipe, chance, began_at = make_world(tmp_path), random.Random(8), time.monotonic()
    assert live(server, recipe, arguments(recipe, "whole"), 600) == 0
    longest_s = time.monotonic() - began_at
    whole = load_checkpoint(tmp_path / "whole" / "checkpoints" / f"step-{STEPS:08d}")
    kills, runs, stood_at = 0, 0, set[int | None]()
    while kills < KILLS:
        runs, ended = runs + 1, False
        while not ended:
            targets = ", ".join(["cpu"] * chance.randint(1, 3))
            more = [f"pipeline.targets=[{targets}]", f"pipeline.readers={chance.randint(1, 2)}"]
            ended = live(server, recipe, arguments(recipe, f"run-{runs}", *more), chance.uniform(0, longest_s)) == 0
            kills += not ended
            longest_s *= 0.7 if ended else 1.1  # about one life in four reaches the end, however busy the machine is
            found = latest_checkpoint(tmp_path / f"run-{runs}" / "checkpoints")
            stood_at.add(found.step)
            assert not found.skipped, f"a torn checkpoint looks like a whole one: {found.skipped}"
        resumed = load_checkpoint(tmp_path / f"run-{runs}" / "checkpoints" / f"step-{STEPS:08d}")
        assert all(tensors_equal(whole.tensors[part], resumed.tensors[part]) for part in ("drafter", "optimizer"))
        assert metrics(tmp_path / "whole") == metrics(tmp_path / f"run-{runs}")
        timeless = ("train_seconds",)
        assert {k: v for k, v in whole.state.items() if k not in timeless} == {
            k: v for k, v in resumed.state.items() if k not in timeless
        }
    assert len(stood_at) > 5, f"every life began at one of {stood_at}: the kills say little"


def test_another_number_of_drafters_goes_on_within_rounding(server: ForkServer, tmp_path: Path) -> None:
    recipe, exact = make_world(tmp_path), "train.compute_dtype=float32"
    splits = [("[cpu, cpu]", 2), ("[cpu]", 4), ("[cpu, cpu, cpu, cpu]", 1)]
    words = [[f"pipeline.drafters={d}", f"train.grad_accum_steps={a}", exact] for d, a in splits]
    assert live(server, recipe, arguments(recipe, "whole", *words[1]), 600) == 0
    for own in words[:2]:
        run_until(server, recipe, arguments(recipe, "moved", *own), 20)
    assert live(server, recipe, arguments(recipe, "moved", *words[2]), 600) == 0
    one, other = (
        load_checkpoint(tmp_path / name / "checkpoints" / f"step-{STEPS:08d}").tensors["drafter"]
        for name in ("whole", "moved")
    )
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-3)


def run_until(server: ForkServer, recipe: Path, words: list[str], steps: int) -> None:
    """Kill the run once it has trained ``steps`` more."""
    path = recipe.parent / "moved" / "metrics.jsonl"
    child, before = server.start(words, recipe.parent / "logs"), path.read_bytes().count(b"\n") if path.exists() else 0
    while not path.exists() or path.read_bytes().count(b"\n") < before + steps:
        assert not child.ended_within(0.02), child.output
    child.send(signal.SIGKILL)
    child.wait()
