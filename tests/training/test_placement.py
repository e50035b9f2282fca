"""The arithmetic of placements, on the baseline's own measurements and on invented ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.training.placement import Pace, Placement, check_fit, expected, placements, recommend

TOKENS = 12_288.0
ANCHORS_512 = Pace(TOKENS / 31_100, TOKENS / 20_600, TOKENS)
"""An 8B target and its drafter on one H200 each."""
ANCHORS_128 = Pace(TOKENS / 31_200, TOKENS / 72_900, TOKENS)

seconds = st.floats(0.01, 10.0)


def gpus(count: int) -> tuple[str, ...]:
    return tuple(f"cuda:{i}" for i in range(count))


def best(pace: Pace, count: int) -> Placement:
    found = recommend(list(placements(pace, gpus(count))))
    assert found is not None
    return found


def test_together_on_both_beats_one_each_where_the_drafter_is_the_heavier_side():
    apart = expected(ANCHORS_512, ["cuda:0"], ["cuda:1"])
    assert (round(apart.tokens_per_s), apart.limit, apart.together) == (20_600, "drafter", False)
    together = best(ANCHORS_512, 2)
    assert (together.targets, together.drafters) == (gpus(2), gpus(2))
    assert together.tokens_per_s == pytest.approx(2 * 31_100 * 20_600 / (31_100 + 20_600))


def test_a_light_drafter_lives_on_one_of_the_target_devices():
    found = best(ANCHORS_128, 2)
    assert (found.targets, found.drafters, found.limit) == (gpus(2), ("cuda:1",), "both")
    assert found.tokens_per_s > 1.3 * expected(ANCHORS_128, ["cuda:0"], ["cuda:1"]).tokens_per_s


def test_one_device_does_both_in_turn():
    pace = Pace(1.0, 3.0, 8.0)
    assert best(pace, 1) == Placement(("cuda:0",), ("cuda:0",), 2.0, "both")


def test_without_a_target_every_device_trains():
    assert expected(Pace(0.0, 2.0, 10.0), gpus(2), gpus(2)).tokens_per_s == pytest.approx(10.0)


def test_what_does_not_fit_is_not_recommended():
    found = list(placements(ANCHORS_512, gpus(2)))
    apart_only = check_fit(found, lambda placement: not placement.together)
    assert [p.fits for p in apart_only].count(True) == 1
    chosen = recommend(apart_only)
    assert chosen is not None and chosen.drafters == ("cuda:1",)
    assert recommend(check_fit(found, lambda placement: False)) is None


@given(seconds, seconds, st.integers(1, 8))
def test_no_placement_beats_all_devices_busy_all_the_time(target_s, drafter_s, count):
    pace = Pace(target_s, drafter_s, 1.0)
    found = list(placements(pace, gpus(count)))
    limit = count / (target_s + drafter_s)
    assert all(placement.tokens_per_s <= limit * (1 + 1e-9) for placement in found)
    assert max(placement.tokens_per_s for placement in found) == pytest.approx(limit)


def simulate(pace: Pace, num_targets: int, num_drafters: int, count: int = 4000) -> float:
    """Micro-batches one by one through loops that are apart: the slow, obvious rate."""
    targets, drafters, ready = [0.0] * num_targets, [0.0] * num_drafters, 0.0
    for seq in range(count):
        first = min(range(num_targets), key=targets.__getitem__)
        targets[first] += pace.target_s
        lane = seq % num_drafters
        drafters[lane] = ready = max(drafters[lane], targets[first]) + pace.drafter_s
    return count / max(ready, *drafters)


@given(seconds, seconds, st.integers(1, 4), st.integers(1, 4))
def test_apart_equals_a_simulated_pipeline(target_s, drafter_s, num_targets, num_drafters):
    pace = Pace(target_s, drafter_s, 1.0)
    devices = gpus(num_targets + num_drafters)
    told = expected(pace, devices[:num_targets], devices[num_targets:])
    assert told.tokens_per_s == pytest.approx(simulate(pace, num_targets, num_drafters, 600), rel=0.05)
