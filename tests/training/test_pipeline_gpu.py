"""The whole pipeline on a GPU: it never waits for the device, and trains what the CPU trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helixctl.data.store import Store
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.supervisor import Progress
from helixctl.machine import read_machine
from helixctl.plan import Plan, make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training.build import Targets, build_pipeline
from helixctl.training.optim import StepOutcome
from helixctl.training.process import set_up_process
from helixctl.training.run import run_training
from helixctl.training.state import TrainState
from helixctl.training.warmup import allow_recompiling
from helixctl.training.wiring import Control
from tests.training.worlds import MACHINE, make_world

pytestmark = pytest.mark.gpu
FLOAT32 = ("train.compute_dtype=float32", "drafter.num_anchors=16", "train.micro_batch_rows=2")


def gpu_plan(recipe: Path, *overrides: str) -> Plan:
    """The plan of a world's recipe on this machine."""
    return make_plan(load_recipe(recipe, (*FLOAT32, *overrides)), read_machine())


class Watch:
    """An observer under which waiting for the device is an error, from one step to another."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.watched = 0

    def restore(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        """Nothing to restore."""

    def started(self) -> None:
        """Training begins."""

    def stepped(self, step: int, _sums: dict[str, Tensor], _outcome: StepOutcome) -> None:
        """Count what was watched."""
        if step == self._first:
            torch.cuda.set_sync_debug_mode("error")
        elif self._first < step <= self._last:
            self.watched += 1
        if step == self._last:
            torch.cuda.set_sync_debug_mode("default")

    def validated(self, sums: dict[str, Tensor], model: nn.Module, seconds: float) -> None:
        """Not done here."""

    def boundary(self, model: nn.Module, optimizer: torch.optim.AdamW, *, stopping: bool) -> None:
        """Nothing is saved."""


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_ten_steps_never_wait_for_the_device(tmp_path: Path, graphs: str) -> None:
    steps = ("train.steps=20", "validation.every_steps=0", "train.log_every_steps=1000", f"compile.graphs={graphs}")
    plan = gpu_plan(make_world(tmp_path), *steps)
    set_up_process(plan)
    watch = Watch(5, 15)
    control = Control(InterruptFlag(), Progress())
    try:
        built = build_pipeline(plan, Store.open(plan.recipe.data.store), TrainState(), watch, control, Targets(plan))
        built.supervisor.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        allow_recompiling()
    assert watch.watched == 10


def losses(plan: Plan) -> list[float]:
    """The training loss of every step."""
    run_training(plan)
    path = Path(plan.recipe.run.dir) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_fifty_steps_are_those_of_the_cpu_however_they_are_run(tmp_path: Path) -> None:
    recipe = make_world(tmp_path)
    steps = ("train.steps=50", "train.log_every_steps=1", "validation.every_steps=10")
    ways = {
        "captured": ("compile.graphs=on",),
        "launched": ("compile.graphs=off",),
        "parts": ("compile.graphs=on", "train.pass_rows=1"),
        "two targets": ("pipeline.targets=[cuda:0, cuda:0]",),
        "two drafters": ("pipeline.drafters=[cuda:0, cuda:0]", "train.micro_batch_rows=1"),
        "target on the CPU": ("pipeline.targets=[cpu]", "pipeline.drafters=[cuda:0]"),
    }
    expected = losses(make_plan(load_recipe(recipe, (*FLOAT32, *steps, f"run.dir={tmp_path}/cpu")), MACHINE))
    assert len(expected) == 50
    for i, (way, overrides) in enumerate(ways.items()):
        got = losses(gpu_plan(recipe, *steps, *overrides, f"run.dir={tmp_path}/{i}"))
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=2e-3, atol=2e-3, msg=way)
