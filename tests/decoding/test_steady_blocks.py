"""The speculator of fixed shapes gives what the slow loop gives: on fakes for all inputs, on real models, on a GPU."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helixctl.decoding import steady_blocks, steady_work
from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.sampling import Sampling, probabilities
from helixctl.decoding.speculative import decode_plain, decode_speculative
from helixctl.decoding.steady_blocks import SteadySpeculator
from helixctl.errors import UsageError
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.decoding.fakes import (
    ChainPolicy,
    ChainTarget,
    FakePolicy,
    FakeTreePolicy,
    SteadyChain,
    SteadyFake,
    hopeless,
    perfect,
    sometimes,
)
from tests.decoding.test_decoding_gpu import PROMPTS, make
from tests.decoding.test_real_target import OraclePolicy
from tests.decoding.test_sampling import PROMPT, fit
from tests.tiny import save_tiny, tiny_llama


@st.composite
def cases(draw):
    vocab_size = draw(st.integers(2, 12))
    token = st.integers(0, vocab_size - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=6), max_size=9))
    options = DecodeOptions(
        max_new_tokens=draw(st.integers(1, 14)),
        stop_ids=frozenset(draw(st.sets(token, max_size=2))),
        batch_size=draw(st.integers(1, 5)),
        max_len=draw(st.one_of(st.none(), st.integers(7, 12))),
    )
    target = SteadyFake(vocab_size, salt=draw(st.integers(0, 999)))
    return target, prompts, options, draw(st.integers(2, 6))


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([perfect, hopeless]))
def test_answers_and_what_was_accepted_are_those_of_the_slow_loop(case, right):
    target, prompts, options, size = case
    found = SteadySpeculator(target, FakePolicy(target, size, right)).decode(prompts, options)
    assert found == decode_speculative(target, FakePolicy(target, size, right), prompts, options)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from([0.3, 0.7]))
def test_tokens_are_those_of_the_slow_loop_whatever_the_drafter_proposes(case, share):
    target, prompts, options, size = case
    found = SteadySpeculator(target, FakePolicy(target, size, sometimes(share))).decode(prompts, options)
    for prompt, one in zip(prompts, found, strict=True):
        room = options.max_new_tokens if options.max_len is None else options.max_len - len(prompt)
        assert list(one.tokens) == target.answer(prompt, min(room, options.max_new_tokens), options.stop_ids)
        assert sum(one.accepted) == len(one.tokens) - 1 and len(one.judged) == len(one.accepted)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 20), st.sampled_from([0.5, 100.0]))
def test_trees_give_the_tokens_of_the_slow_loop(case, budget, weight):
    target, prompts, options, size = case
    policy = FakeTreePolicy(target, size, sometimes(0.7), weight=weight)
    found = SteadySpeculator(target, policy).decode(prompts, replace(options, tree_budget=budget))
    for one, plain in zip(found, decode_plain(target, prompts, options), strict=True):
        assert one.tokens == plain.tokens
        assert sum(one.accepted) == len(one.tokens) - 1 and len(one.judged) == len(one.accepted)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_a_tree_that_is_a_chain_is_accepted_like_one(case):
    target, prompts, options, size = case
    policy = FakeTreePolicy(target, size, lambda rng, j: j != 2, weight=1000.0)
    found = SteadySpeculator(target, policy).decode(prompts, replace(options, tree_budget=size - 1))
    assert all(one.tree_nodes in (0, size - 1) for one in found)
    assert [replace(one, tree_nodes=0) for one in found] == SteadySpeculator(target, policy).decode(prompts, options)


def test_rows_are_kept_for_the_next_set_where_they_fit():
    target = SteadyFake()
    speculator = SteadySpeculator(target, FakeTreePolicy(target, 4, perfect))
    options = DecodeOptions(max_new_tokens=20, batch_size=4)
    speculator.decode([[3] * (2 + i % 7) for i in range(9)], options)
    first = speculator._rows
    speculator.decode([[4, 4]] * 5, options)
    assert speculator._rows is first
    for changed in (
        replace(options, block_size=2),
        replace(options, temperature=1.0),
        replace(options, tree_budget=5),
        replace(options, tree_budget=6),
    ):
        before = speculator._rows
        speculator.decode([[4, 4]] * 5, changed)
        assert speculator._rows is not before
    speculator.decode([[3] * 300] * 4, options)
    assert speculator._rows is not None and speculator._rows.shape.length == 384


def test_a_perfect_drafter_wastes_few_forwards():
    """The host looks every few cycles; a full batch computes hardly more than its answers."""
    target = SteadyFake(script=lambda prefix: 5)
    found = SteadySpeculator(target, FakePolicy(target, 4, perfect)).decode(
        [[3, 4]] * 16, DecodeOptions(33, batch_size=8)
    )
    assert all(one.accepted == (4,) * 8 for one in found)
    assert sum(width == 4 for _, width in target.calls) == 2 * 8


def test_what_cannot_be_is_refused():
    target = SteadyFake()
    speculator = SteadySpeculator(target, FakePolicy(target, 4, perfect))
    with pytest.raises(UsageError, match="prompt 1 has 9 tokens"):
        speculator.decode([[3], [3] * 9], DecodeOptions(9, max_len=9))
    with pytest.raises(UsageError, match="block size 5 is not between 2"):
        speculator.decode([[3]], DecodeOptions(9, block_size=5))
    assert speculator.decode([], DecodeOptions(9)) == []


@pytest.mark.parametrize(("one_by_one", "budget"), [(False, None), (True, None), (True, 6)])
def test_samples_weigh_what_enumeration_says(one_by_one, budget):
    how, policy = Sampling(0.8), ChainPolicy(one_by_one=one_by_one)
    expected = ChainTarget().sequence_probabilities(PROMPT, 4, lambda logits: probabilities(logits, how))
    options = DecodeOptions(4, temperature=0.8, batch_size=1000, seed=11, tree_budget=budget)
    found = SteadySpeculator(SteadyChain(), policy).decode([PROMPT] * 4000, options)
    assert fit(Counter(one.tokens for one in found), expected) > 1e-3


def test_features_of_a_real_target_reach_the_right_rows(tmp_path, monkeypatch):
    """Prompts of all lengths, more of them than rows, prefilled in several groups; the policy looks at what it gets."""
    monkeypatch.setattr(steady_work, "PREFILL_TOKENS", 16)
    model = tiny_llama()
    target = Target.load(TargetOptions(model=str(save_tiny(model, tmp_path))), [0, 2], "cpu", torch.float32)
    options = DecodeOptions(max_new_tokens=17, batch_size=3)
    plain = decode_plain(target, PROMPTS, options)
    states = [model(torch.tensor([[*one.prompt_ids, *one.tokens]]), output_hidden_states=True) for one in plain]
    features = [(found.hidden_states[1][0], found.hidden_states[3][0]) for found in states]
    policy = Lenient(plain, features)
    found = SteadySpeculator(target, policy).decode(PROMPTS, options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert min(one.accept_len or 0 for one in found) > 2


class Lenient(OraclePolicy):
    """Rows whose answer is finished, or has not begun, may have any features."""

    def _row(self, row, anchor):
        try:
            return super()._row(row, anchor)
        except AssertionError:
            return torch.zeros(3, dtype=torch.int64)


def test_a_real_drafter_gives_what_it_gives_in_the_slow_loop(tmp_path):
    target, policy = make(tmp_path, "cpu")
    for block_size, tree_budget in ((None, None), (3, None), (None, 9)):
        options = DecodeOptions(max_new_tokens=8, batch_size=3, block_size=block_size, tree_budget=tree_budget)
        expected = decode_speculative(target, policy, PROMPTS, options)
        assert SteadySpeculator(target, policy).decode(PROMPTS, options) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree_budget", [None, 24])
def test_captured_cycles_equal_those_that_are_launched(tmp_path, caplog, monkeypatch, temperature, tree_budget):
    target, policy = make(tmp_path, "cuda:0")
    options = DecodeOptions(max_new_tokens=40, batch_size=8, temperature=temperature, tree_budget=tree_budget)
    with caplog.at_level(logging.WARNING):
        captured = SteadySpeculator(target, policy).decode(PROMPTS * 4, options)
    assert not caplog.records, "captured, not launched one by one"
    monkeypatch.setattr(steady_blocks._Rows, "_captured", lambda self: self._cycle)
    assert [one.tokens for one in SteadySpeculator(target, policy).decode(PROMPTS * 4, options)] == [
        one.tokens for one in captured
    ]
    if not temperature:
        assert [one.tokens for one in captured] == [
            one.tokens for one in decode_speculative(target, policy, PROMPTS * 4, options)
        ]


@pytest.mark.gpu
def test_a_drafter_that_waits_for_the_device_decodes_without_a_graph(tmp_path, caplog):
    target, policy = make(tmp_path, "cuda:0")
    options = DecodeOptions(max_new_tokens=12, batch_size=2)
    expected = [one.tokens for one in decode_speculative(target, policy, PROMPTS, options)]
    draft = policy.draft

    def waiting(*given):
        torch.cuda.synchronize()
        return draft(*given)

    policy.draft = waiting
    with caplog.at_level(logging.WARNING):
        assert [one.tokens for one in SteadySpeculator(target, policy).decode(PROMPTS, options)] == expected
    assert "cannot be captured" in caplog.text
