"""The schedule, the optimizer step on summed gradients, and what a checkpoint keeps of the optimizer."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helixctl.recipe.schema import TrainOptions
from helixctl.training.optim import (
    gradients,
    learning_rate_scale,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    take_step,
)


def options(**values: object) -> TrainOptions:
    return TrainOptions.model_validate({"steps": 100, **values})


@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    total=st.integers(1, 500),
    warmup=st.floats(0, 1),
    floor=st.floats(0, 1),
)
def test_the_rate_rises_once_falls_once_and_stays_between_floor_and_peak(
    schedule: str, total: int, warmup: float, floor: float
) -> None:
    chosen = options(schedule=schedule, warmup_ratio=warmup, min_lr_ratio=floor)
    rates = [learning_rate_scale(step, total, chosen) for step in range(total)]
    top = rates.index(max(rates))
    assert all(0 < rate <= 1 + 1e-12 for rate in rates) or floor == 0
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(rates[: top + 1]))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[top:]))
    assert all(rate >= floor - 1e-12 for rate in rates[round(warmup * total) :])


def test_known_points_of_every_schedule() -> None:
    cosine = options(schedule="cosine", warmup_ratio=0.0)
    assert learning_rate_scale(50, 100, cosine) == pytest.approx(0.5)
    assert learning_rate_scale(25, 100, options(schedule="linear", warmup_ratio=0.0)) == pytest.approx(0.75)
    wsd = options(schedule="wsd", warmup_ratio=0.0, decay_ratio=0.2)
    assert [learning_rate_scale(s, 100, wsd) for s in (0, 79, 90)] == pytest.approx([1.0, 1.0, 0.5])
    assert learning_rate_scale(99, 100, options(schedule="constant")) == 1.0
    assert learning_rate_scale(0, 100, options(warmup_ratio=0.04)) == pytest.approx(1 / 5)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def test_vectors_are_not_decayed() -> None:
    groups = make_optimizer(model(), options(weight_decay=0.1)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim >= 2 for p in groups[0]["params"]) and all(p.ndim < 2 for p in groups[1]["params"])


def test_a_step_equals_torchs_own_on_the_mean_gradient_clipped_by_its_norm() -> None:
    ours, reference = model(), model()
    x = torch.randn(5, 4)
    optimizer = make_optimizer(ours, options())
    gradients(optimizer)
    denominator = torch.tensor(7.0)
    ours(x).square().sum().backward()
    outcome = take_step(optimizer, denominator, 0.01, max_grad_norm=0.05)
    (reference(x).square().sum() / 7.0).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    torch.optim.AdamW(reference.parameters(), lr=0.01, betas=options().betas, weight_decay=0.0).step()
    assert float(outcome.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert a.grad is not None and not a.grad.any()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_neither_parameters_nor_moments(poison: float) -> None:
    net = model()
    optimizer = make_optimizer(net, options())
    gradients(optimizer)
    net(torch.randn(5, 4)).sum().backward()
    take_step(optimizer, torch.tensor(1.0), 0.1, 1.0)
    before = [p.clone() for p in net.parameters()], {k: v.clone() for k, v in optimizer_tensors(net, optimizer).items()}
    (net(torch.randn(5, 4)).sum() * poison).backward()
    outcome = take_step(optimizer, torch.tensor(1.0), 0.1, 1.0)
    assert not bool(outcome.finite) and not bool(outcome.taken)
    assert all(torch.equal(a, b) for a, b in zip(before[0], net.parameters(), strict=True))
    after = optimizer_tensors(net, optimizer)
    assert all(torch.equal(before[1][name], after[name]) for name in after)
    assert all(not p.grad.isnan().any() for p in net.parameters() if p.grad is not None)


@pytest.mark.parametrize("denominator", [0.0, 3.0])
def test_a_step_without_any_supervised_token_moves_neither_parameters_nor_adam(denominator: float) -> None:
    net = model()
    optimizer = make_optimizer(net, options(weight_decay=0.1))
    gradients(optimizer)
    net(torch.randn(5, 4)).sum().backward()
    assert bool(take_step(optimizer, torch.tensor(1.0), 0.1, 1.0).taken)
    before = {name: value.clone() for name, value in state(net, optimizer).items()}
    outcome = take_step(optimizer, torch.tensor(denominator), 0.1, 1.0)
    assert (bool(outcome.finite), bool(outcome.taken)) == (True, denominator > 0)
    moved = {name for name, value in state(net, optimizer).items() if not torch.equal(before[name], value)}
    assert not moved if denominator == 0 else len(moved) == len(before)


def state(net: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Parameters, moments and step counts."""
    return {**dict(net.named_parameters()), **optimizer_tensors(net, optimizer)}


def test_moments_come_back_bit_for_bit() -> None:
    one, other = model(), model()
    first = make_optimizer(one, options())
    gradients(first)
    one(torch.randn(5, 4)).sum().backward()
    take_step(first, torch.tensor(2.0), 0.1, 1.0)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(one, first).items()}
    second = make_optimizer(other, options())
    load_optimizer_tensors(other, second, saved)
    assert {k: v.tolist() for k, v in optimizer_tensors(other, second).items()} == {
        k: v.tolist() for k, v in saved.items()
    }
