"""Meters: true means over a window, whatever happens inside it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helixctl.metrics import names
from helixctl.metrics.meter import Meter, Throughput


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_accumulation_4_logged_every_10_is_the_average_of_40() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(40, generator=generator)
    weights = torch.randint(0, 50, (40,), generator=generator)  # micro-batches are not equally heavy
    meter = Meter()
    for step in range(10):
        for micro in range(4):
            i = 4 * step + micro
            meter.add(names.TRAIN_LOSS, losses[i] * weights[i], weights[i])
    by_hand = sum(loss * weight for loss, weight in zip(losses.tolist(), weights.tolist(), strict=True))
    assert meter.flush()[names.TRAIN_LOSS] == pytest.approx(by_hand / int(weights.sum()), rel=1e-6)
    assert meter.flush() == {}


@given(
    st.lists(
        st.tuples(st.floats(-1e3, 1e3), st.integers(1, 100), st.booleans(), st.booleans()), min_size=1, max_size=30
    )
)
def test_mean_is_sum_over_sum_for_tensors_and_numbers(parts: list[tuple[float, int, bool, bool]]) -> None:
    meter = Meter()
    for numerator, denominator, as_tensor, as_count in parts:
        top = torch.tensor(numerator, dtype=torch.float64) if as_tensor else numerator
        bottom = torch.tensor(denominator) if as_count else denominator
        meter.add("a/b", top, bottom)
    expected = math.fsum(p[0] for p in parts) / sum(p[1] for p in parts)
    assert meter.flush()["a/b"] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_same_tensor_as_numerator_of_two_names_is_not_changed() -> None:
    meter, correct = Meter(), torch.tensor(8.0)
    for _ in range(3):
        meter.add("a/one", correct, 10)
        meter.add("a/two", correct, 8)
    assert meter.flush() == {"a/one": 0.8, "a/two": 1.0}
    assert correct.item() == 8.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_values_that_are_not_finite_stay_visible(bad: float, as_tensor: bool) -> None:
    meter = Meter()
    meter.add("a/bad", torch.tensor(bad) if as_tensor else bad, 2)
    meter.add("a/bad", 1.0, 2)
    meter.add("a/good", 1.0, 2)
    values = meter.flush()
    assert values["a/good"] == 0.5
    assert math.isnan(values["a/bad"]) if math.isnan(bad) else values["a/bad"] == bad
    meter.add("a/bad", 3.0)
    assert meter.flush() == {"a/bad": 3.0}


def test_a_mean_over_nothing_is_nan_and_over_zero_weight_infinite() -> None:
    meter = Meter()
    meter.add("a/empty", torch.tensor(0.0), torch.tensor(0))
    meter.add("a/wrong", -1.0, 0.0)
    values = meter.flush()
    assert math.isnan(values["a/empty"])
    assert values["a/wrong"] == -math.inf


def test_sums_and_last_values() -> None:
    meter = Meter()
    for step in range(3):
        meter.add_total("train/bad_steps", torch.tensor(1))
        meter.set("train/learning_rate", 0.1 * step)
    assert meter.flush() == {"train/bad_steps": 3.0, "train/learning_rate": 0.2}


def test_gradients_and_inference_tensors_may_be_added() -> None:
    meter = Meter()
    meter.add("a/b", torch.tensor(2.0, requires_grad=True) * 3)
    with torch.inference_mode():
        meter.add("a/b", torch.tensor(1.0))
        meter.add("a/b", torch.tensor(1.0))
    meter.add("a/b", torch.tensor(0.0))
    assert meter.flush() == {"a/b": 2.0}


def test_many_small_values_do_not_drown_in_a_large_sum() -> None:
    meter = Meter()
    meter.add("a/b", torch.tensor(2.0**24), 0)
    for _ in range(16):
        meter.add("a/b", torch.tensor(1.0), 0)
    meter.add("a/b", 0, 1)
    assert meter.flush() == {"a/b": 2.0**24 + 16}


def test_a_vector_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match=r"\(2,\)"):
        Meter().add("a/b", torch.zeros(2))


def test_throughput_counts_the_window_without_pauses() -> None:
    clock = FakeClock()
    meter = Throughput(clock)
    for _ in range(2):
        clock.now += 1.5
        meter.step()
    with meter.paused():
        clock.now += 60.0
    assert meter.flush(600) == {names.PERF_TOKENS_PER_S: 200.0, names.PERF_STEP_MS: 1500.0}
    clock.now += 2.0
    meter.step()
    meter.pause(1.0)
    assert meter.flush(50) == {names.PERF_TOKENS_PER_S: 50.0, names.PERF_STEP_MS: 1000.0}
    assert meter.flush(0) == {}


def test_more_tensors_than_a_sum_keeps_are_added_up():
    meter = Meter()
    for _ in range(2500):
        meter.add_total("n", torch.tensor(1.0))
        meter.add("m", torch.tensor(3.0), torch.tensor(2.0, dtype=torch.float64))
    values = meter.flush()
    assert values["n"] == 2500.0
    assert values["m"] == 1.5
