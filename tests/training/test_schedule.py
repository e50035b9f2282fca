"""Training stages: each has its own warm-up and fall, and may begin with a fresh optimizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helixctl.recipe.schema import ScheduleOptions, StepOptions
from helixctl.training.optim import clear_moments, gradients, learning_rate_scale, make_optimizer, take_step
from helixctl.training.schedule import Schedule, TrainingStage


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4), data=st.data())
def test_a_stage_follows_its_own_schedule_as_if_it_were_alone(lengths: list[int], data: st.DataObject) -> None:
    stages, first = [], 0
    for i, length in enumerate(lengths):
        rate = data.draw(st.floats(1e-6, 1.0))
        options = ScheduleOptions(learning_rate=rate, warmup_ratio=data.draw(st.floats(0, 1)), min_lr_ratio=0.1)
        stages.append(TrainingStage(first, length, options, fresh_optimizer=i > 0))
        first += length
    schedule = Schedule(tuple(stages))
    for stage in stages:
        for step in range(stage.num_steps):
            alone = stage.options.learning_rate * learning_rate_scale(step, stage.num_steps, stage.options)
            assert schedule.learning_rate(stage.first_step + step) == alone
            assert schedule.begins_fresh(stage.first_step + step) == (stage.fresh_optimizer and step == 0)


def test_warm_up_is_counted_in_optimizer_steps() -> None:
    options = ScheduleOptions(warmup_steps=4, warmup_ratio=0.9)
    assert [learning_rate_scale(step, 100, options) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert ScheduleOptions(warmup_steps=40).warmup_of(10) == 10


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)
        self.middle = nn.Linear(4, 4)
        self.head.weight = self.table.weight


def test_decay_reaches_matrices_only_and_a_tied_head_is_an_embedding() -> None:
    model = _Tied()
    decayed, spared = make_optimizer(model, StepOptions(weight_decay=0.1)).param_groups
    assert [id(p) for p in decayed["params"]] == [id(model.middle.weight)]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(spared["params"]) == len(list(model.parameters())) - 1


def test_cleared_moments_take_the_step_of_a_new_optimizer() -> None:
    torch.manual_seed(0)
    used, new = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = make_optimizer(used, StepOptions())
    for gradient in gradients(optimizer):
        gradient.fill_(3.0)
    take_step(optimizer, torch.tensor(1.0), 0.1, 1.0)
    new.load_state_dict(used.state_dict())
    fresh = make_optimizer(new, StepOptions())
    clear_moments(optimizer)
    for one in (optimizer, fresh):
        for gradient in gradients(one):
            gradient.fill_(-1.0)
        take_step(one, torch.tensor(1.0), 0.01, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(used.parameters(), new.parameters(), strict=True))
