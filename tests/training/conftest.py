"""A small world that has been prepared and trained once for a whole test module; tests only read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from helixctl.plan import Plan
from helixctl.training.results import TrainResult
from helixctl.training.run import run_training
from tests.chats import make_chat_world, prepare_world
from tests.training.worlds import make_world_plan


@dataclass(frozen=True)
class TrainedWorld:
    """Where it is, and what training said."""

    recipe: Path
    result: TrainResult

    def plan(self, *overrides: str) -> Plan:
        """The plan of its recipe."""
        return make_world_plan(self.recipe, *overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedWorld:
    """A chat world after 4 steps, checkpoints at 2 and 4."""
    recipe = prepare_world(make_chat_world(tmp_path_factory.mktemp("world")))
    return TrainedWorld(recipe, run_training(make_world_plan(recipe)))
