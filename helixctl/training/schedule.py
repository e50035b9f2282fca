"""The learning rate of every step of a run, whose training stages stand one behind the other."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from helixctl.lm_plan import AnyPlan, CausalLMPlan
from helixctl.recipe.schema import ScheduleOptions
from helixctl.training.optim import learning_rate_scale
from helixctl.training.state import num_steps


@dataclass(frozen=True)
class TrainingStage:
    """A part of the run with a schedule of its own."""

    first_step: int
    num_steps: int
    options: ScheduleOptions
    fresh_optimizer: bool = False
    """Adam's moments begin at zero with it."""


class Schedule:
    """The training stages of a run, in order."""

    def __init__(self, stages: tuple[TrainingStage, ...]) -> None:
        assert stages and stages[0].first_step == 0, "a run begins with a stage"
        self._stages = stages
        self._first_steps = [stage.first_step for stage in stages]

    def learning_rate(self, step: int) -> float:
        """Of optimizer step ``step``; the first is 0."""
        stage = self._at(step)
        scale = learning_rate_scale(step - stage.first_step, stage.num_steps, stage.options)
        return stage.options.learning_rate * scale

    def begins_fresh(self, step: int) -> bool:
        """Whether the optimizer forgets its moments before ``step``."""
        stage = self._at(step)
        return stage.fresh_optimizer and stage.first_step == step

    def _at(self, step: int) -> TrainingStage:
        return self._stages[bisect_right(self._first_steps, step) - 1]


def make_schedule(plan: AnyPlan) -> Schedule:
    """The stages of a causal LM; a drafter has one.

    Raises:
        UsageError: the plan was made before the data was prepared.
    """
    if not isinstance(plan, CausalLMPlan):
        return Schedule((TrainingStage(0, num_steps(plan), plan.recipe.train),))
    num_steps(plan)
    stages = []
    for stage in plan.stages:
        assert stage.first_step is not None and stage.num_steps is not None, "all are known where their sum is"
        fresh = stage.options.optimizer == "fresh"
        stages.append(TrainingStage(stage.first_step, stage.num_steps, stage.options, fresh))
    return Schedule(tuple(stages))
