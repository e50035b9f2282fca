"""Blocks cut by what their drafter expects: the same greedy answers, samples of the same distribution, rows alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helixctl.decoding.acceptance import judged_cycles
from helixctl.decoding.confidence import Confidence, worth_verifying
from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.distribution import check_samples
from helixctl.decoding.sampling import Sampling, judge_drafts, probabilities
from helixctl.decoding.speculative import decode_plain, decode_speculative
from helixctl.decoding.steady_blocks import SteadySpeculator
from helixctl.errors import UsageError
from tests.decoding.fakes import (
    ChainPolicy,
    ChainTarget,
    FakePolicy,
    FakeTarget,
    SteadyChain,
    SteadyFake,
    TellingPolicy,
    hopeless,
    perfect,
    sometimes,
)
from tests.decoding.test_sampling import PROMPT, SOFT, answers, fit, options
from tests.decoding.test_speculative import cases

THRESHOLDS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
SHARES = st.lists(st.floats(0, 1), max_size=8)


@given(SHARES, st.floats(0, 1))
def test_a_block_is_cut_where_the_product_falls_below_the_threshold(told: list[float], threshold: float):
    probabilities = torch.tensor([told])
    (count,) = worth_verifying(probabilities, threshold).tolist()
    assert all(math.prod(told[: k + 1]) >= threshold - 1e-6 for k in range(count))
    assert count == len(told) or math.prod(told[: count + 1]) < threshold + 1e-6
    assert worth_verifying(probabilities, 0.0).tolist() == [len(told)]


@settings(max_examples=100, deadline=None)
@given(cases(), THRESHOLDS)
def test_greedy_answers_are_the_targets_own_wherever_blocks_are_cut(case, threshold):
    target, prompts, options, block_size, share = case
    options = replace(options, confidence_threshold=threshold)
    policy = TellingPolicy(target, block_size, sometimes(share))
    for prompt, one in zip(prompts, decode_speculative(target, policy, prompts, options), strict=True):
        limit = min(options.max_new_tokens, (options.max_len or 99) - len(prompt))
        assert list(one.tokens) == target.answer(prompt, limit, options.stop_ids)
        assert sum(one.accepted) == len(one.tokens) - 1
        assert [len(told) for told in one.confidences] == list(one.judged)
        start = len(prompt) + 1
        for told, emitted, (num_kept, num_judged) in zip(
            one.confidences, one.accepted, judged_cycles(one), strict=True
        ):
            expected = policy.sure([*prompt, *one.tokens][:start])
            assert list(told) == pytest.approx(expected[:num_judged])
            assert num_kept <= num_judged
            assert math.prod(told) >= threshold - 1e-6
            start += emitted
            room = limit - (start - len(prompt)) + emitted - 1
            if start < len(prompt) + len(one.tokens) and num_judged < min(block_size - 1, room):
                assert math.prod(expected[: num_judged + 1]) < threshold + 1e-6


@settings(max_examples=40, deadline=None)
@given(cases(), THRESHOLDS, st.sampled_from([0.0, 1.0]))
def test_a_row_is_cut_as_if_it_were_alone(case, threshold, temperature):
    target, prompts, options, block_size, _ = case
    options = replace(options, confidence_threshold=threshold, temperature=temperature)
    prompts = list(dict.fromkeys(map(tuple, prompts)))  # the same prompt again gets another sample
    together = decode_speculative(target, TellingPolicy(target, block_size, perfect), prompts, options)
    for prompt, one in zip(prompts, together, strict=True):
        assert [one] == decode_speculative(target, TellingPolicy(target, block_size, perfect), [prompt], options)


def test_rows_of_one_cycle_have_blocks_of_different_lengths():
    """Four rows that verify 3, 1, 0 and 2 drafts: one forward, as wide as the longest."""

    class Fixed(TellingPolicy):
        def sure(self, prefix):
            return [1.0 if k < {5: 3, 6: 1, 7: 0, 8: 2}[prefix[0]] else 0.2 for k in range(4)]

    target = FakeTarget(50, script=lambda prefix: (prefix[-1] + 1) % 50)
    options = DecodeOptions(max_new_tokens=20, confidence_threshold=0.5)
    found = decode_speculative(target, Fixed(target, 5, perfect), [[5], [6], [7], [8]], options)
    assert [one.accepted[:4] for one in found] == [(4,) * 4, (2,) * 4, (1,) * 4, (3,) * 4]
    assert [one.judged[:4] for one in found] == [(3,) * 4, (1,) * 4, (0,) * 4, (2,) * 4]
    assert target.calls[1:5] == [(4, 4)] * 4
    assert target.calls[-1] == (1, 1), "the row that verifies nothing ends as in plain decoding"


def test_a_threshold_of_zero_cuts_nothing():
    target, prompts = FakeTarget(), [[1, 2], [3]]
    options = DecodeOptions(max_new_tokens=30)
    whole = decode_speculative(target, FakePolicy(target, 5, perfect), prompts, options)
    told = decode_speculative(
        target, TellingPolicy(target, 5, perfect), prompts, replace(options, confidence_threshold=0)
    )
    assert [replace(one, confidences=()) for one in told] == whole
    assert all(whole[0].confidences == () and len(one.confidences) == len(one.accepted) for one in told)


def test_a_drafter_that_tells_nothing_is_refused():
    target = FakeTarget()
    with pytest.raises(UsageError, match="does not tell how sure it is"):
        decode_speculative(target, FakePolicy(target, 4, perfect), [[1]], DecodeOptions(9, confidence_threshold=0.5))
    plain = DecodeOptions(9, confidence_threshold=0.5)
    assert decode_plain(target, [[1]], plain) == decode_plain(target, [[1]], DecodeOptions(9))


def test_a_drafter_that_tells_after_it_drew_is_stopped():
    told = torch.ones(2, 1)
    confidence = Confidence(lambda logits: logits.argmax(-1), 0.5)
    confidence.tell(told)
    confidence.choose(torch.zeros(2, 1, 5))
    with pytest.raises(AssertionError, match="before it draws the draft"):
        confidence.choose(torch.zeros(2, 1, 5))


@settings(max_examples=60, deadline=None)
@given(cases(), THRESHOLDS, st.sampled_from([perfect, hopeless]))
def test_cycles_of_fixed_shapes_give_the_same_answers_and_verify_the_same_drafts(case, threshold, right):
    target, prompts, options, block_size, _ = case
    target, options = SteadyFake(target.vocab_size, target.salt), replace(options, confidence_threshold=threshold)
    found = SteadySpeculator(target, TellingPolicy(target, block_size, right)).decode(prompts, options)
    assert found == decode_speculative(target, TellingPolicy(target, block_size, right), prompts, options)


@pytest.mark.parametrize("threshold", [0.1, 0.4])
def test_samples_of_fixed_shapes_weigh_what_enumeration_says(threshold):
    expected = ChainTarget().sequence_probabilities(PROMPT, 4, lambda logits: probabilities(logits, SOFT))
    decoder = SteadySpeculator(SteadyChain(), ChainPolicy(one_by_one=True))
    options = DecodeOptions(4, temperature=0.8, batch_size=1000, seed=11, confidence_threshold=threshold)
    found = decoder.decode([PROMPT] * 4000, options)
    assert fit(Counter(one.tokens for one in found), expected) > 1e-3
    assert {count for one in found for count in one.judged} == {0, 1, 2}  # the last block has no room for three


def test_rows_of_another_threshold_are_others():
    target = SteadyFake()
    decoder = SteadySpeculator(target, TellingPolicy(target, 4, perfect))
    asked = [decoder.decode([[1, 2]], DecodeOptions(9, confidence_threshold=p))[0].judged for p in (0.0, 1.0, None)]
    assert asked[0] == asked[2] != asked[1]


QUARTERS = st.lists(st.integers(0, 2), min_size=4, max_size=4).map(lambda drawn: [drawn.count(i) / 4 for i in range(3)])
GRID = 12
"""Midpoints of as many equal parts hit every case of quarters with exactly its weight: p / q and the shares of what is
left of p - q have denominators up to 4."""


def two_tokens(p, q, count_of):
    """The law [3, 3] of the first two tokens of a cycle that drafts two, by enumeration of all that is random.

    Args:
        p: The target's first token [3], and its second by the first [3, 3].
        q: The drafter's, likewise.
        count_of: How many drafts are judged, from both of them.
    """
    grid = (torch.arange(GRID) + 0.5) / GRID
    uniforms = torch.cartesian_prod(grid, grid, grid)
    law = torch.zeros(3, 3, dtype=torch.float64)
    for one, two in itertools.product(range(3), repeat=2):
        weight = float(q[0][one] * q[1][one, two]) / len(uniforms)
        if not weight:
            continue
        rows = len(uniforms)
        target = torch.stack([p[0], p[1][one], torch.ones(3) / 3]).expand(rows, -1, -1)
        drafter = torch.stack([q[0], q[1][one]]).expand(rows, -1, -1)
        drafts = torch.tensor([[one, two]]).expand(rows, -1)
        limits = torch.tensor(count_of(one, two)).expand(rows)
        num_kept, tokens = judge_drafts(target, drafter, drafts, uniforms, limits)
        assert bool((num_kept <= limits).all())
        whole = num_kept > 0
        law += torch.bincount(tokens[whole, 0] * 3 + tokens[whole, 1], minlength=9).view(3, 3) * weight
        alone = torch.bincount(tokens[~whole, 0], minlength=3) * weight  # the second comes from the next cycle
        law += alone[:, None] * p[1]
    return law


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_is_cut_by_what_is_known_before_leaves_the_distribution_exact(data):
    def chain():
        rows = [data.draw(QUARTERS) for _ in range(4)]
        return torch.tensor(rows[0]), torch.tensor(rows[1:])

    p, q = chain(), chain()
    first, second = data.draw(st.booleans()), [data.draw(st.booleans()) for _ in range(3)]
    law = two_tokens(p, q, lambda one, two: first * (1 + second[one]))
    torch.testing.assert_close(law, (p[0][:, None] * p[1]).double(), rtol=0, atol=1e-9)


def test_a_cut_that_knows_the_draft_bends_the_distribution():
    """The drafter is the target: all it drafts is kept. Token 0 is never verified, so that it is drawn again."""
    p = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([[0.25, 0.5, 0.25]] * 3)
    law = two_tokens(p, p, lambda one, two: 2 * (one != 0))
    assert law.sum(1).tolist() == pytest.approx([0.25, 0.75, 0.0])


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3, 0.7])
def test_samples_weigh_what_enumeration_says_at_any_threshold(threshold):
    expected = ChainTarget().sequence_probabilities(PROMPT, 4, lambda logits: probabilities(logits, SOFT))
    found = answers(options(SOFT, confidence_threshold=threshold), ChainPolicy(one_by_one=True))
    assert fit(found, expected) > 1e-3


def test_samples_pass_the_test_for_a_real_targets_distribution():
    prompts = [(1, 2), (3, 0, 1), (2, 2)] * 50
    how = DecodeOptions(max_new_tokens=30, temperature=0.8, batch_size=150, seed=1, confidence_threshold=0.3)
    found = decode_speculative(ChainTarget(), ChainPolicy(one_by_one=True), prompts, how)
    assert Counter(count for one in found for count in one.judged).keys() == {0, 1, 2, 3}
    checked = check_samples(ChainTarget(), found, Sampling(0.8))
    assert checked.holds and checked.p_value > 0.01
