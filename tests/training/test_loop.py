"""What the training loop leaves behind besides weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.supervisor import Progress
from helixctl.training.build import Targets, build_pipeline
from helixctl.training.state import TrainState
from helixctl.training.wiring import Control
from tests.training.worlds import make_world, make_world_plan


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_nothing_counts_that_was_run_to_compile(tmp_path: Path) -> None:
    plan = make_world_plan(make_world(tmp_path), "compile.mode=on", f"run.dir={tmp_path / 'run'}")
    control = Control(InterruptFlag(), Progress())
    (drafter,) = build_pipeline(plan, None, TrainState(), None, control, Targets(plan)).drafters
    torch.compiler.set_stance("force_eager")
    try:
        drafter.setup()
    finally:
        torch.compiler.set_stance("default")
    assert (drafter.trained_tokens, drafter.step_number) == (0, 0)
    assert drafter.num_done == {"train": 0, "validation": 0}
