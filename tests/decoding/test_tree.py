"""Trees of drafts: the best under the budget, followed as far as the target goes; decoding with them is lossless."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helixctl.decoding.acceptance import acceptance_by_position
from helixctl.decoding.decoded import DecodeOptions, accept_len
from helixctl.decoding.distribution import check_samples
from helixctl.decoding.sampling import Sampling, probabilities
from helixctl.decoding.speculative import decode_plain, decode_speculative
from helixctl.decoding.tree import TreeShape, accepted_path, draft_tree
from helixctl.errors import UsageError
from tests.decoding.fakes import (
    ChainPolicy,
    ChainTarget,
    FakePolicy,
    FakeTarget,
    FakeTreePolicy,
    hopeless,
    perfect,
    sometimes,
)
from tests.decoding.test_sampling import NUM_ANSWERS, PROMPT, fit

ANCHOR = 1


@st.composite
def forests(draw):
    """Two rows of logits behind every token of the slot before: [R, B-1, V, V], all behind it the same for `alike`."""
    vocab_size, block_size = draw(st.integers(2, 5)), draw(st.integers(2, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    logits = torch.randn(2, block_size - 1, vocab_size, vocab_size, generator=generator)
    logits *= draw(st.sampled_from([0.1, 1.0, 5.0, 50.0]))
    if draw(st.booleans()):  # equal weights, which decide nothing
        logits = logits.round()
    alike = draw(st.booleans())
    if alike:
        logits = logits[:, :, :1].expand_as(logits)
    return logits, TreeShape(block_size, draw(st.integers(1, 40)), draw(st.sampled_from([1.0, 0.5]))), alike


def grow(logits, shape, alike):
    rows = torch.arange(len(logits))[:, None]

    def next_logits(slot, tokens):
        return logits[:, slot, :1] if alike else logits[rows, slot, tokens]

    return draft_tree(torch.full((len(logits),), ANCHOR % logits.shape[-1]), next_logits, shape)


def prefixes(tree, row):
    """Every draft with those before it, by node; the anchor has none."""
    return [
        tuple(tree.tokens[row, tree.paths[row, node, 1 : depth + 1]].tolist())
        for node, depth in enumerate(tree.depths[row].tolist())
    ]


def weights(logits, shape):
    """Log-probability of every possible prefix of one row, by enumeration."""
    shares = (logits.double() / shape.temperature).log_softmax(-1)
    found: dict[tuple[int, ...], float] = {(): 0.0}
    for slot in range(shape.block_size - 1):
        for prefix in [prefix for prefix in found if len(prefix) == slot]:
            before = prefix[-1] if prefix else ANCHOR % logits.shape[-1]
            for token, share in enumerate(shares[slot, before].tolist()):
                found[(*prefix, token)] = found[prefix] + share
    return found


@settings(max_examples=80, deadline=None)
@given(forests())
def test_a_tree_is_the_best_of_its_size(forest):
    logits, shape, alike = forest
    tree = grow(logits, shape, alike)
    for row in range(2):
        known, found = weights(logits[row], shape), prefixes(tree, row)
        assert len(set(found)) == len(found) == min(1 + shape.budget, len(known))
        best = sorted(known.values(), reverse=True)[: len(found)]
        assert [known[prefix] for prefix in found] == pytest.approx(best, rel=1e-5, abs=1e-3)
        for node, (prefix, parent) in enumerate(zip(found, tree.parents[row].tolist(), strict=True)):
            assert node == parent == 0 or (parent < node and found[parent] == prefix[:-1])
            seen = tree.ancestors[row, node].nonzero()[:, 0].tolist()
            assert [found[other] for other in seen] == [prefix[:depth] for depth in range(len(prefix) + 1)]


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(0, 999))
def test_the_target_goes_as_far_as_the_tree_has_what_it_says(forest, seed):
    logits, shape, alike = forest
    tree = grow(logits, shape, alike)
    target = FakeTarget(logits.shape[-1], salt=seed)
    found = [prefixes(tree, row) for row in range(2)]
    choices = torch.tensor([[target.next_token((row, *prefix)) for prefix in found[row]] for row in range(2)])
    num_accepted, path = accepted_path(tree, choices)
    for row in range(2):
        said: list[int] = []
        while tuple(said) in found[row]:
            said.append(target.next_token((row, *said)))
        assert int(num_accepted[row]) == len(said) - 1
        assert choices[row, path[row, : len(said)]].tolist() == said
        assert tree.depths[row, path[row]].tolist() == [min(d, len(said) - 1) for d in range(shape.block_size)]


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(0, 999))
def test_a_tree_is_expected_to_be_accepted_no_less_far_than_a_chain(forest, seed):
    """By the drafter's own odds a tree of B - 1 nodes or more never; and whatever the target says, if it holds it."""
    logits, shape, alike = forest
    shape = replace(shape, budget=max(shape.budget, shape.block_size - 1))
    tree = grow(logits, shape, alike)
    for row in range(2):
        chain, known = [ANCHOR % logits.shape[-1]], weights(logits[row], shape)
        for slot in range(shape.block_size - 1):
            chain.append(int(logits[row, slot, chain[-1]].argmax()))
        cuts = [tuple(chain[1 : end + 1]) for end in range(1, shape.block_size)]
        found = prefixes(tree, row)
        expected = sum(torch.tensor([known[prefix] for prefix in found if prefix]).exp().tolist())
        assert expected >= sum(torch.tensor([known[cut] for cut in cuts]).exp().tolist()) - 1e-4
        if cuts[-1] in found:
            target = FakeTarget(logits.shape[-1], salt=seed)
            choices = torch.tensor([[target.next_token(prefix) for prefix in found]] * 2)
            kept = [target.next_token(tuple(chain[1 : k + 1])) == chain[k + 1] for k in range(shape.block_size - 1)]
            assert int(accepted_path(tree, choices)[0][row]) >= [*kept, False].index(False)


def test_a_broken_drafter_makes_a_tree_all_the_same():
    for broken in (float("nan"), float("-inf"), float("inf")):
        logits = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(3))
        logits[0] = broken
        logits[1, :, :, 2] = broken
        tree = grow(logits, TreeShape(4, 9), True)
        for row in range(2):
            found = prefixes(tree, row)
            assert len(set(found)) == 10
            assert all(prefix[:-1] in found[:node] for node, prefix in enumerate(found) if node)


# ------------------------------------------------------------------------------------------------------------- decoding


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
        tree_budget=draw(st.integers(1, 20)),
    )
    target = FakeTarget(vocab_size, salt=draw(st.integers(0, 999)))
    right = sometimes(draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])))
    policy = FakeTreePolicy(target, draw(st.integers(2, 6)), right, weight=draw(st.sampled_from([0.5, 2.0, 100.0])))
    return target, prompts, options, policy


@settings(max_examples=80, deadline=None)
@given(cases())
def test_trees_give_what_plain_decoding_gives(case):
    target, prompts, options, policy = case
    plain = decode_plain(target, prompts, options)
    for prompt, one, other in zip(prompts, plain, decode_speculative(target, policy, prompts, options), strict=True):
        assert (one.tokens, one.finish, one.prompt_ids) == (other.tokens, other.finish, tuple(prompt))
        assert sum(other.accepted) == len(other.tokens) - 1 and len(other.judged) == len(other.accepted)
        assert all(1 <= emitted <= policy.block_size for emitted in other.accepted)
        assert [token for token, _ in other.segments] == list(other.tokens)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 6))
def test_a_tree_that_is_a_chain_is_accepted_like_one(case, period):
    """All weight on one continuation and B - 1 nodes: also what was judged and how it ended is the chain's."""
    target, prompts, options, policy = case
    policy.weight, policy.right = 1000.0, lambda rng, j: j % 7 != period
    chain = decode_speculative(target, policy, prompts, replace(options, tree_budget=None))
    trees = decode_speculative(target, policy, prompts, replace(options, tree_budget=policy.block_size - 1))
    assert [replace(one, tree_nodes=0) for one in trees] == chain


class SecondBest(FakePolicy):
    """Its best draft is wrong everywhere, and its second best is right."""

    def branch(self, anchor_ids, positions, call):
        weighed: list[torch.Tensor] = []
        for self.right, weight in ((perfect, 50.0), (hopeless, 51.0)):
            self.draft(anchor_ids, positions, replace(call, choose=weighed.append))
            weighed[-1] *= weight
        return lambda slot, tokens: (weighed[0] + weighed[1])[:, slot, None]


def test_a_tree_finds_what_a_chain_misses():
    target, options = FakeTarget(), DecodeOptions(max_new_tokens=13)
    assert accept_len(decode_speculative(target, SecondBest(target, 4, hopeless), [[1, 2]], options)) == 1.0
    policy, options = SecondBest(target, 4, hopeless), replace(options, tree_budget=14)
    [found] = decode_speculative(target, policy, [[1, 2]], options)
    assert found.accepted == (4, 4, 4) and list(found.tokens) == target.answer([1, 2], 13)
    assert target.calls[-1] == (1, 15) and (found.tree_nodes, found.num_verified) == (14, 42)
    assert [(one.judged, one.accepted) for one in acceptance_by_position([found])] == [(3, 3)] * 3


@pytest.mark.parametrize("stop", range(11, 20))
def test_a_stop_token_inside_a_tree_cuts_it(stop):
    target = FakeTarget(50, script=lambda prefix: (prefix[-1] + 1) % 50)
    options = DecodeOptions(max_new_tokens=30, stop_ids=frozenset({stop}), tree_budget=9)
    [one] = decode_speculative(target, FakeTreePolicy(target, 4, perfect, weight=9.0), [[9]], options)
    assert one.tokens == tuple(range(10, stop + 1)) and one.finish == "stop"
    kinds = ["prefill"] + ["draft", "draft", "draft", "bonus"] * 3
    assert one.segments == tuple(zip(range(10, stop + 1), kinds, strict=False))


def test_a_shorter_block_makes_a_shallower_tree():
    target = FakeTarget()
    policy = FakeTreePolicy(target, 6, perfect, weight=100.0)
    [one] = decode_speculative(target, policy, [[1, 2]], DecodeOptions(max_new_tokens=7, block_size=3, tree_budget=8))
    assert one.accepted == (3, 3)


def test_what_cannot_be_is_refused():
    target = FakeTarget()
    with pytest.raises(UsageError, match="drafts no trees"):
        decode_speculative(target, FakePolicy(target, 4, perfect), [[1]], DecodeOptions(9, tree_budget=4))
    trees = FakeTreePolicy(target, 4, perfect)
    with pytest.raises(UsageError, match="a tree of 0 drafts"):
        decode_speculative(target, trees, [[1]], DecodeOptions(9, tree_budget=0))
    with pytest.raises(UsageError, match="not cut by a confidence threshold"):
        decode_speculative(target, trees, [[1]], DecodeOptions(9, tree_budget=4, confidence_threshold=0.5))


# ------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("how", "budget", "one_by_one"),
    [(Sampling(0.8), 6, False), (Sampling(1.3, top_k=3), 20, True), (Sampling(1.0, top_p=0.8), 1, False)],
)
def test_samples_weigh_what_enumeration_says(how, budget, one_by_one):
    options = DecodeOptions(4, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p, tree_budget=budget)
    expected = ChainTarget().sequence_probabilities(PROMPT, 4, lambda logits: probabilities(logits, how))
    policy = ChainPolicy(one_by_one=one_by_one)
    found = decode_speculative(
        ChainTarget(), policy, [PROMPT] * NUM_ANSWERS, replace(options, batch_size=NUM_ANSWERS, seed=7)
    )
    assert max(itertools.chain.from_iterable(one.accepted for one in found)) > 1
    assert fit(Counter(one.tokens for one in found), expected) > 1e-3


def test_long_samples_pass_the_test_for_any_target():
    prompts = [(1, 2), (3, 0, 1), (2, 2)] * 50
    options = DecodeOptions(max_new_tokens=30, temperature=0.8, batch_size=150, seed=1, tree_budget=7)
    found = check_samples(
        ChainTarget(), decode_speculative(ChainTarget(), ChainPolicy(), prompts, options), Sampling(0.8)
    )
    assert found.num_tokens == 150 * 30 and found.p_value > 0.01


def test_samples_do_not_hang_on_the_other_prompts():
    prompts = [[1, 2, 3], [3, 1], [0, 1, 2, 3, 1, 1, 2], [3, 3]]
    options = DecodeOptions(max_new_tokens=12, temperature=1.0, seed=3, tree_budget=9, batch_size=3)
    together = decode_speculative(ChainTarget(), ChainPolicy(), prompts, options)
    assert together == [decode_speculative(ChainTarget(), ChainPolicy(), [prompt], options)[0] for prompt in prompts]
