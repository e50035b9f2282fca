"""Acceptance per position, against a drafter that is right where it was told to be."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from helixctl.decoding.acceptance import acceptance_by_position
from helixctl.decoding.decoded import Decoded, DecodeOptions, accept_len
from helixctl.decoding.speculative import decode_speculative
from tests.decoding.fakes import FakePolicy, FakeTarget, perfect, sometimes


def answer(accepted, judged, *, whole=True):
    tokens = tuple(range(sum(accepted) + 1))
    return Decoded((1,), tokens, accepted, "length", judged, last_is_bonus=whole)


def test_by_hand():
    found = acceptance_by_position([answer((4, 1, 2), (3, 3, 1), whole=True), answer((2,), (2,), whole=False)])
    assert [(p.position, p.judged, p.reached, p.accepted) for p in found] == [(1, 4, 4, 3), (2, 3, 2, 2), (3, 2, 1, 1)]
    assert [p.share for p in found] == [3 / 4, 2 / 3, 1 / 2]
    assert [p.conditional for p in found] == [3 / 4, 1.0, 1.0]
    assert acceptance_by_position([]) == ()


def test_a_position_that_is_always_wrong():
    """Right about the first two drafts, never about the third."""
    target = FakeTarget(50)
    policy = FakePolicy(target, 5, lambda rng, j: j < 2)
    found = acceptance_by_position(decode_speculative(target, policy, [[1]], DecodeOptions(max_new_tokens=31)))
    assert [p.share for p in found] == [1.0, 1.0, 0.0, 0.0]
    assert [p.conditional for p in found] == [1.0, 1.0, 0.0, 0.0]
    assert [p.reached for p in found] == [10, 10, 9, 0]  # the last block had room for two drafts


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.sampled_from([0.0, 0.4, 0.8, 1.0]), st.integers(2, 30), st.sets(st.integers(0, 10)))
def test_shares_add_up_to_the_acceptance_length(block_size, share, max_new_tokens, stops):
    """Where nothing was cut, accept_len is 1 + the sum of the shares; always, counts fall with the position."""
    target = FakeTarget()
    options = DecodeOptions(max_new_tokens=max_new_tokens, stop_ids=frozenset(stops))
    answers = decode_speculative(target, FakePolicy(target, block_size, sometimes(share)), [[1, 2], [3]], options)
    found = acceptance_by_position(answers)
    cycles = sum(len(one.accepted) for one in answers)
    emitted = sum(sum(one.accepted) for one in answers)
    bonuses = cycles - sum(not one.last_is_bonus for one in answers if one.accepted)
    assert sum(p.accepted for p in found) == emitted - bonuses
    for before, after in itertools.pairwise(found):
        assert before.judged >= after.judged and before.accepted >= after.accepted
    for p in found:
        assert p.accepted <= p.reached <= p.judged <= cycles
        assert p.position < block_size


def test_a_perfect_drafter_is_accepted_everywhere():
    target = FakeTarget()
    answers = decode_speculative(target, FakePolicy(target, 4, perfect), [[1]], DecodeOptions(max_new_tokens=13))
    found = acceptance_by_position(answers)
    assert [p.share for p in found] == [1.0] * 3 and accept_len(answers) == 4.0
