"""A trained drafter out of a checkpoint, for the commands that use one: validate and export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helixctl.checkpoint.published import is_published
from helixctl.checkpoint.store import load_checkpoint
from helixctl.errors import CheckpointError
from helixctl.plan import Plan
from helixctl.training.build import build_drafter, drafter_plugin
from helixctl.training.published import load_into, open_for
from helixctl.training.state import TrainState, check_same_drafter


@dataclass(frozen=True)
class Trained:
    """A drafter as it was after ``step`` optimizer steps."""

    model: nn.Module
    step: int
    """0 for a published drafter, which does not say."""


def load_trained(plan: Plan, checkpoint: Path, device: torch.device) -> Trained:
    """The drafter of ``checkpoint`` on ``device``; also of a published drafter's folder, whoever made it.

    Raises:
        CheckpointError: torn, or made for another target, other taps, another mask token or other sizes than the plan.
    """
    if is_published(checkpoint):
        found = open_for(plan, checkpoint, starts=False)
        model = build_drafter(plan, device)
        load_into(model, found)
        return Trained(model, 0)
    loaded = load_checkpoint(checkpoint)
    check_same_drafter(TrainState.from_json(loaded.state).fingerprints, plan)
    if "drafter" not in loaded.tensors:
        raise CheckpointError(f"{checkpoint} holds no drafter", fix="name a checkpoint that `helixctl train` wrote")
    model = build_drafter(plan, device)
    plugin: Any = drafter_plugin(plan)
    plugin.import_state(model, loaded.tensors["drafter"])
    return Trained(model, loaded.step)
