"""Anchors: the eligibility rule against a loop, and a uniform draw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.data.anchors import draw_anchors, eligible_anchors, first_anchor

ROWS = st.lists(st.tuples(st.booleans(), st.sampled_from([-1, 0, 1])), min_size=1, max_size=60)


def slow_eligible(mask: list[bool], documents: list[int]) -> list[int]:
    return [
        i
        for i in range(len(mask) - 1)
        if mask[i] and mask[i + 1] and documents[i] == documents[i + 1] and documents[i] >= 0
    ]


@given(ROWS, st.integers(1, 20), st.integers(0, 5))
def test_drawn_anchors_are_eligible_sorted_and_distinct(
    row: list[tuple[bool, int]], num_anchors: int, seed: int
) -> None:
    mask, documents = [m for m, _ in row], [d for _, d in row]
    expected = slow_eligible(mask, documents)
    assert np.flatnonzero(eligible_anchors(np.array(mask), np.array(documents))).tolist() == expected
    anchors, valid = draw_anchors(np.array(mask), np.array(documents), num_anchors, np.random.default_rng(seed))
    drawn = anchors[valid].tolist()
    assert anchors.shape == valid.shape == (num_anchors,)
    assert anchors.dtype == np.int64 and valid.dtype == np.bool_
    assert drawn == sorted(set(drawn)) and set(drawn) <= set(expected)
    assert len(drawn) == min(num_anchors, len(expected))
    assert not anchors[~valid].any()


@given(st.lists(st.booleans(), max_size=30))
def test_first_anchor_equals_the_first_eligible_position(mask: list[bool]) -> None:
    expected = slow_eligible(mask, [0] * len(mask))
    assert first_anchor(np.array(mask, dtype=np.bool_)) == (expected[0] if expected else -1)


@given(ROWS, st.integers(1, 20), st.integers(1, 4), st.integers(0, 5))
def test_no_document_has_more_anchors_than_allowed(
    row: list[tuple[bool, int]], num_anchors: int, most: int, seed: int
) -> None:
    mask, documents = [m for m, _ in row], sorted((d for _, d in row), key=lambda d: (d < 0, d))
    expected = slow_eligible(mask, documents)
    allowed = {d: min(most, sum(documents[i] == d for i in expected)) for d in (0, 1)}
    rng = np.random.default_rng(seed)
    anchors, valid = draw_anchors(np.array(mask), np.array(documents), num_anchors, rng, most)
    drawn = anchors[valid].tolist()
    assert drawn == sorted(set(drawn)) and set(drawn) <= set(expected)
    assert len(drawn) == min(num_anchors, sum(allowed.values()))
    assert all(sum(documents[i] == d for i in drawn) <= allowed[d] for d in (0, 1))


def test_positions_of_a_document_are_equally_likely_under_a_limit() -> None:
    rng = np.random.default_rng(0)
    mask, documents = np.ones(30, np.bool_), np.repeat([0, 1], [10, 20])
    counts = np.zeros(30)
    for _ in range(2000):
        counts[draw_anchors(mask, documents, 8, rng, 3)[0][:6]] += 1
    assert counts[9] == counts[29] == 0
    assert np.abs(counts[:9] / 2000 - 3 / 9).max() < 0.05 and np.abs(counts[10:29] / 2000 - 3 / 19).max() < 0.05


@pytest.mark.parametrize("seed", range(3))
def test_every_eligible_position_is_equally_likely(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask, documents = np.ones(21, np.bool_), np.zeros(21, np.int32)
    counts = np.zeros(21)
    for _ in range(2000):
        counts[draw_anchors(mask, documents, 5, rng)[0]] += 1
    assert counts[20] == 0
    assert np.abs(counts[:20] - 500).max() < 100
