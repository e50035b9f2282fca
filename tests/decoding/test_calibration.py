"""What a drafter told against what became of its drafts, by hand and against a drafter that knows its odds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.decoding.calibration import calibrate, calibrations
from helixctl.decoding.decoded import Decoded, DecodeOptions
from helixctl.decoding.speculative import decode_speculative
from tests.decoding.fakes import FakeTarget, TellingPolicy


def answer(accepted, judged, confidences, *, whole=True):
    tokens = tuple(range(sum(accepted) + 1))
    return Decoded((1,), tokens, accepted, "length", judged, last_is_bonus=whole, confidences=confidences)


def test_by_hand():
    """Cycles of three drafts: two accepted, all accepted, none; then one that a stop token cut behind its first."""
    told = ((0.9, 0.5, 0.5), (1.0, 1.0, 0.8), (0.4, 0.5, 0.1), (0.9,))
    found = calibrations([answer((3, 4, 1, 1), (3, 3, 3, 1), told, whole=False)])
    assert found is not None
    reached, survival = found.reached, found.survival
    assert (reached.num_drafts, survival.num_drafts) == (8, 10)
    assert reached.accepted == 6 / 8 and survival.accepted == 6 / 10
    assert reached.predicted == pytest.approx((0.9 + 0.5 + 0.5 + 1 + 1 + 0.8 + 0.4 + 0.9) / 8)
    bins = [(one.low, one.num_drafts, one.accepted) for one in reached.bins]
    assert bins == [(0.4, 1, 0.0), (0.5, 2, 0.5), (0.8, 1, 1.0), (0.9, 4, 1.0)]
    assert reached.error == pytest.approx((0.4 + 2 * 0.0 + 0.2 + 4 * 0.05) / 8)
    assert [one.num_drafts for one in survival.bins] == [1, 2, 2, 1, 4]
    assert survival.bins[0].predicted == pytest.approx(0.4 * 0.5 * 0.1)


def test_nothing_was_told():
    assert calibrations([]) is None
    assert calibrations([answer((1, 1), (0, 0), ((), ()))]) is None
    assert calibrations([answer((2,), (1,), ())]) is None


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30))
def test_means_and_error_are_those_of_the_pairs(pairs):
    found = calibrate(pairs)
    assert sum(one.num_drafts for one in found.bins) == found.num_drafts == len(pairs)
    assert found.accepted == pytest.approx(sum(right for _, right in pairs) / len(pairs))
    assert all(one.low <= one.predicted + 1e-9 and one.predicted <= one.high + 1e-9 for one in found.bins)
    assert abs(found.predicted - found.accepted) <= found.error + 1e-9 <= 1 + 1e-8


def test_a_drafter_that_knows_its_odds_is_calibrated_and_one_that_boasts_is_not():
    """Right with the probability that it tells, whatever is cut; then told twice as often as it is right."""
    target = FakeTarget(50)

    class Knows(TellingPolicy):
        factor = 1.0

        def sure(self, prefix):
            return [min(1.0, self.factor * share) for share in shares(prefix)]

        def _row(self, r, token, position):
            prefix = [*self.context[r, :position].tolist(), token]
            odds, draws = shares(prefix), random.Random(f"outcome {prefix}")
            self.right = lambda rng, j: draws.random() < odds[j]
            return super()._row(r, token, position)

    def shares(prefix):
        numbers = random.Random(f"odds {prefix}")
        return [0.2 + 0.3 * numbers.random() for _ in range(4)]

    for threshold, factor, low, high in ((0.0, 1.0, 0.0, 0.05), (0.1, 1.0, 0.0, 0.05), (0.0, 2.0, 0.2, 0.5)):
        policy = Knows(target, 5, None)
        policy.factor = factor
        options = DecodeOptions(max_new_tokens=200, confidence_threshold=threshold)
        found = calibrations(decode_speculative(target, policy, [[k] for k in range(6)], options))
        assert found is not None
        assert low <= found.reached.error <= high, found.reached
        assert found.survival.error <= high
