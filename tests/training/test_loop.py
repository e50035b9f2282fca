"""What the training loop leaves behind besides weights."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.supervisor import Progress
from helixctl.training.build import Targets, build_pipeline
from helixctl.training.stages import fill_slot
from helixctl.training.state import TrainState
from helixctl.training.warmup import made_up_batch
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


def test_a_micro_batch_is_gone_when_its_slot_has_the_next_one(tmp_path: Path) -> None:
    """Which documents were left out is told once per window; only what that takes is kept so long."""
    plan = make_world_plan(make_world(tmp_path), "train.max_bad_steps=99", f"run.dir={tmp_path / 'run'}")
    pipeline = build_pipeline(plan, None, TrainState(), None, Control(InterruptFlag(), Progress()), Targets(plan))
    (drafter,), slot = pipeline.drafters, pipeline.wires.own_slots[0][0]
    drafter.setup()
    seen = []
    for _ in range(3):
        batch = made_up_batch(plan)
        seen.append(weakref.ref(batch))
        fill_slot(slot, batch, [torch.randn_like(feature) for feature in slot.features])
        drafter.rehearse([slot])
    del batch
    gc.collect()
    assert [batch() is None for batch in seen] == [True, True, False]  # the last one is the slot's
