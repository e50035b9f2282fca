from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixctl.decoding import rows
from helixctl.decoding.decoded import accept_len
from helixctl.decoding.speculative import DecodeOptions, DecodeProgress, decode_plain, decode_speculative, stream_plain
from helixctl.errors import UsageError
from tests.decoding.fakes import FakePolicy, FakeTarget, hopeless, perfect, sometimes

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2], [3, 3]]


@st.composite
def cases(draw):
    vocab_size = draw(st.integers(2, 12))
    token = st.integers(0, vocab_size - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=6))
    options = DecodeOptions(
        max_new_tokens=draw(st.integers(1, 14)),
        stop_ids=frozenset(draw(st.sets(token, max_size=2))),
        batch_size=draw(st.integers(1, 5)),
        max_len=draw(st.one_of(st.none(), st.integers(7, 12))),
    )
    target = FakeTarget(vocab_size, salt=draw(st.integers(0, 999)))
    return target, prompts, options, draw(st.integers(2, 6)), draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_speculative_equals_plain_equals_reference(case):
    target, prompts, options, block_size, share = case
    plain = decode_plain(target, prompts, options)
    speculative = decode_speculative(target, FakePolicy(target, block_size, sometimes(share)), prompts, options)
    for prompt, one, other in zip(prompts, plain, speculative, strict=True):
        room = options.max_new_tokens if options.max_len is None else options.max_len - len(prompt)
        expected = target.answer(prompt, min(room, options.max_new_tokens), options.stop_ids)
        assert list(one.tokens) == list(other.tokens) == expected
        assert one.prompt_ids == other.prompt_ids == tuple(prompt)
        assert one.finish == other.finish == ("stop" if expected[-1] in options.stop_ids else "length")
        assert one.accepted == (1,) * (len(expected) - 1)
        assert sum(other.accepted) == len(expected) - 1
        assert all(1 <= emitted <= block_size for emitted in other.accepted)
        assert [token for token, _ in other.segments] == expected


@pytest.mark.parametrize("block_size", [2, 3, 5])
def test_a_perfect_drafter_gets_the_ceiling(block_size):
    target = FakeTarget()
    options = DecodeOptions(max_new_tokens=1 + 4 * block_size)
    decoded = decode_speculative(target, FakePolicy(target, block_size, perfect), PROMPTS, options)
    assert accept_len(decoded) == block_size
    assert all(one.accepted == (block_size,) * 4 and one.accept_len == block_size for one in decoded)


def test_a_hopeless_drafter_gets_one():
    target = FakeTarget()
    decoded = decode_speculative(target, FakePolicy(target, 4, hopeless), PROMPTS, DecodeOptions(max_new_tokens=9))
    assert accept_len(decoded) == 1.0
    assert {kind for one in decoded for _, kind in one.segments[1:]} == {"bonus"}


def test_acceptance_is_the_mean_prefix_and_not_a_product_of_marginals():
    """Two prompts, one always right and one always wrong: over equally many cycles of 8 the mean is 4.5."""
    target = FakeTarget()
    right = decode_speculative(target, FakePolicy(target, 8, perfect), [[1, 2]], DecodeOptions(max_new_tokens=17))
    wrong = decode_speculative(target, FakePolicy(target, 8, hopeless), [[3]], DecodeOptions(max_new_tokens=3))
    assert accept_len([*right, *wrong]) == 4.5


def counting(prefix):
    """The next token is one more than the last: 1 2 3 ..."""
    return (prefix[-1] + 1) % 50


@pytest.mark.parametrize("stop", range(11, 20))
def test_a_stop_token_inside_a_block_cuts_the_block(stop):
    target = FakeTarget(50, script=counting)
    options = DecodeOptions(max_new_tokens=30, stop_ids=frozenset({stop}))
    [one] = decode_speculative(target, FakePolicy(target, 4, perfect), [[9]], options)
    assert one.tokens == tuple(range(10, stop + 1))
    assert one.finish == "stop"
    kinds = ["prefill"] + ["draft", "draft", "draft", "bonus"] * 3
    assert one.segments == tuple(zip(range(10, stop + 1), kinds, strict=False))


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
def test_the_last_block_is_no_longer_than_what_is_left(max_new_tokens):
    target = FakeTarget(50, script=counting)
    policy = FakePolicy(target, 4, perfect)
    [one] = decode_speculative(target, policy, [[9]], DecodeOptions(max_new_tokens=max_new_tokens))
    assert one.tokens == tuple(range(10, 10 + max_new_tokens))
    assert one.finish == "length"
    whole, rest = divmod(max_new_tokens - 1, 4)
    assert one.accepted == (4,) * whole + (rest,) * bool(rest)
    assert target.calls[1:] == [(1, 4)] * whole + [(1, rest)] * bool(rest)
    assert policy.num_drafts == whole + (rest > 1)


def test_no_cycle_means_no_acceptance_length():
    target = FakeTarget()
    [one] = decode_speculative(target, FakePolicy(target, 4, perfect), [[1]], DecodeOptions(max_new_tokens=1))
    assert one.accepted == () and one.accept_len is None and accept_len([one]) is None
    assert one.segments == ((one.tokens[0], "prefill"),)


@pytest.mark.parametrize("right", [perfect, hopeless])
def test_tokens_equal_to_the_mask_id_are_kept(right):
    """A target that writes the mask id, and a drafter that proposes it, are both taken at their word."""
    mask = 7
    target = FakeTarget(50, script=lambda prefix: mask if len(prefix) % 2 else counting(prefix))
    policy = FakePolicy(target, 4, right, wrong=mask)
    [one] = decode_speculative(target, policy, [[1, mask, 3]], DecodeOptions(max_new_tokens=10))
    assert list(one.tokens) == target.answer([1, mask, 3], 10)
    assert one.tokens.count(mask) == 5


def test_a_smaller_block_than_the_drafters_own():
    target = FakeTarget()
    options = DecodeOptions(max_new_tokens=7, block_size=3)
    [one] = decode_speculative(target, FakePolicy(target, 6, perfect), [[1, 2]], options)
    assert one.accepted == (3, 3)
    with pytest.raises(UsageError, match="not between 2 and the drafter's own"):
        decode_speculative(target, FakePolicy(target, 2, perfect), [[1]], options)


def test_a_block_that_drafts_nothing_is_refused():
    target = FakeTarget()
    with pytest.raises(UsageError, match="not between 2 and"):
        decode_speculative(target, FakePolicy(target, 2, perfect), [[1]], DecodeOptions(max_new_tokens=2, block_size=1))


@pytest.mark.parametrize(("prompt", "message"), [([], "is empty"), ([1, 2, 3], "limit is 3")])
def test_prompts_without_room_are_refused(prompt, message):
    with pytest.raises(UsageError, match=message):
        decode_plain(FakeTarget(), [[1], prompt], DecodeOptions(max_new_tokens=4, max_len=3))


def test_no_prompts_give_no_answers():
    assert decode_plain(FakeTarget(), [], DecodeOptions(max_new_tokens=4)) == []


def test_waiting_prompts_take_the_rows_of_finished_ones():
    """Six prompts in two rows: no call is larger than two rows, and no answer waits for the slowest of a batch."""
    target = FakeTarget(50, script=counting)
    prompts = [[1], [40], [1], [40], [1], [40]]
    options = DecodeOptions(max_new_tokens=40, batch_size=2, stop_ids=frozenset({45}))
    order = [index for index, _ in stream_plain(target, prompts, options)]
    assert set(order) == set(range(6)) and order[0] == 1
    assert max(num_rows for num_rows, _ in target.calls) == 2
    assert sum(num_rows for num_rows, _ in target.calls) < 3 * 40 + 3 * 5 + 40


def test_the_batch_shrinks_when_none_waits():
    target = FakeTarget(50, script=counting)
    prompts = [[1], [40], [40], [40]]
    decode_plain(target, prompts, DecodeOptions(max_new_tokens=40, stop_ids=frozenset({45})))
    assert target.calls[-1] == (1, 1)


def test_long_prompts_are_prefilled_in_several_calls(monkeypatch):
    monkeypatch.setattr(rows, "PREFILL_TOKENS", 40)
    target = FakeTarget(50, script=lambda prefix: len(prefix) % 50)
    decoded = decode_plain(target, [[1] * 20, [2] * 5, [3] * 10], DecodeOptions(max_new_tokens=2))
    assert [one.tokens for one in decoded] == [(20, 21), (5, 6), (10, 11)]
    assert target.calls == [(2, 20), (1, 5), (3, 1)]


def test_progress_counts_prompts_and_tokens():
    target = FakeTarget()
    seen: list[DecodeProgress] = []
    decoded = decode_plain(target, PROMPTS, DecodeOptions(max_new_tokens=5, batch_size=3), on_progress=seen.append)
    assert seen[-1].num_done == seen[-1].num_prompts == 4
    assert seen[-1].num_tokens == sum(len(one.tokens) for one in decoded)
    assert [p.num_tokens for p in seen] == sorted(p.num_tokens for p in seen)


def test_sampling_depends_on_seed_and_prompt_only():
    target = FakeTarget(vocab_size=11)
    options = DecodeOptions(max_new_tokens=12, temperature=1.0, seed=3)
    together = decode_plain(target, PROMPTS, options)
    alone = [decode_plain(target, [prompt], options)[0] for prompt in PROMPTS]
    assert together == alone
    assert together != decode_plain(target, PROMPTS, DecodeOptions(max_new_tokens=12, temperature=1.0, seed=4))
