"""Samples with a drafter have the target's distribution; and the tests that say so see a sampler that is wrong."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helixctl.decoding import rows, sampling
from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.distribution import ALARM, chi_square_p_value
from helixctl.decoding.sampling import Sampling, draw, judge_drafts, probabilities
from helixctl.decoding.speculative import decode_plain, decode_speculative
from tests.decoding.fakes import ChainPolicy, ChainTarget

PROMPT = (1, 2)
NUM_ANSWERS = 4000
SOFT = Sampling(0.8)


def test_probabilities_are_sharpened_then_cut():
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0, -1.0])
    torch.testing.assert_close(probabilities(logits, Sampling(0.5)), (logits * 2).softmax(-1))
    best_two = torch.tensor([3.0, float("-inf"), 2.0, float("-inf"), float("-inf")]).softmax(-1)
    torch.testing.assert_close(probabilities(logits, Sampling(1.0, top_k=2)), best_two)
    assert logits.softmax(-1)[0] < 0.7 < logits.softmax(-1)[[0, 2]].sum()
    torch.testing.assert_close(probabilities(logits, Sampling(1.0, top_p=0.7)), best_two)
    torch.testing.assert_close(probabilities(logits, Sampling(1.0, top_k=2, top_p=0.01)), torch.eye(5)[0])
    torch.testing.assert_close(probabilities(logits, Sampling(1.0, top_k=99)), logits.softmax(-1))


@settings(max_examples=60, deadline=None)
@example([-3.13e-28, 0.0], 2, 1.0, 1.0)
@given(st.lists(st.floats(-20, 20), min_size=1, max_size=8), st.integers(1, 9), st.floats(0.05, 1.0), st.floats(0.1, 3))
def test_probabilities_sum_to_one_and_keep_the_best(values, top_k, top_p, temperature):
    logits = torch.tensor(values)
    shares = probabilities(logits, Sampling(temperature, top_k, top_p))
    assert shares.sum().item() == pytest.approx(1.0, abs=1e-5)
    # Logits that differ by less than rounding weigh the same, and either may be the one that is left.
    assert logits[shares.argmax()].item() == pytest.approx(logits.max().item(), abs=1e-5)
    assert not shares.isnan().any()


def test_draws_follow_the_weights_and_never_what_has_none():
    weights = torch.tensor([0.0, 1.0, 0.0, 0.6, 0.4, 0.0])
    grid = (torch.arange(1000) + 0.5) / 1000
    counts = torch.bincount(draw(weights.expand(1000, -1), grid), minlength=6)
    assert counts.tolist() == pytest.approx([0, 500, 0, 300, 200, 0], abs=1)
    ends = torch.tensor([0.0, 1.0 - 2.0**-30, 1.0])  # the last two are 1.0 in float32
    assert draw(weights.expand(3, -1), ends).tolist() == [1, 4, 4]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_rejection_rule_is_exact_for_every_p_and_q(data):
    """By enumeration over drafts and over a grid of random numbers: what comes out weighs as the target says."""
    weight = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)
    p, q = (torch.tensor(data.draw(weight), dtype=torch.float32) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    size = 40
    grid = (torch.arange(size) + 0.5) / size
    accept, new = (g.reshape(-1) for g in torch.meshgrid(grid, grid, indexing="ij"))
    found = torch.zeros(3)
    for token in range(3):
        if q[token] == 0:
            continue
        drafts = torch.full((size * size, 1), token)
        target, drafter = p.expand(size * size, 2, 3), q.expand(size * size, 1, 3)
        _, tokens = judge_drafts(target, drafter, drafts, torch.stack([accept, new], dim=1))
        found += q[token] * torch.bincount(tokens[:, 0], minlength=3) / size**2
    assert found.tolist() == pytest.approx(p.tolist(), abs=2.5 / size)


def test_kept_drafts_are_followed_by_one_new_token():
    eye = torch.eye(5)
    target = eye[[1, 2, 3, 4]][None]  # wants 1 2 3 4
    drafter = torch.full((1, 3, 5), 0.2)
    numbers = torch.full((1, 4), 0.5)
    for drafts, kept in (([1, 2, 3], 3), ([1, 2, 0], 2), ([1, 0, 3], 1), ([0, 2, 3], 0)):
        num_kept, tokens = judge_drafts(target, drafter, torch.tensor([drafts]), numbers)
        assert num_kept.tolist() == [kept]
        assert tokens[0, : kept + 1].tolist() == [1, 2, 3, 4][: kept + 1]


def test_where_rounding_leaves_no_rest_the_target_decides():
    p = torch.tensor([[[0.5, 0.5, 0.0]] * 2])
    _, tokens = judge_drafts(p, p[:, :1] * 2, torch.tensor([[0]]), torch.tensor([[0.9, 0.75]]))
    assert tokens[0, 0].item() == 1


def fit(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """p-value of a chi-square test of counts against probabilities; rare cells are pooled."""
    total = sum(found.values())
    common = {cell: share for cell, share in expected.items() if share * total >= 5}
    pairs = [(found[cell], share * total) for cell, share in common.items()]
    rest = total * (1 - sum(common.values()))
    if rest >= 5:
        pairs.append((total - sum(count for count, _ in pairs), rest))
    return chi_square_p_value(sum((a - b) ** 2 / b for a, b in pairs), len(pairs) - 1)


def answers(options: DecodeOptions, policy: ChainPolicy | None) -> Counter[tuple[int, ...]]:
    target, prompts = ChainTarget(), [PROMPT] * NUM_ANSWERS
    if policy is None:
        found = decode_plain(target, prompts, options)
    else:
        found = decode_speculative(target, policy, prompts, options)
    return Counter(one.tokens for one in found)


def options(how: Sampling, **values) -> DecodeOptions:
    sizes = {"max_new_tokens": 4, "batch_size": NUM_ANSWERS, "seed": 7}
    return DecodeOptions(temperature=how.temperature, top_k=how.top_k, top_p=how.top_p, **{**sizes, **values})


@pytest.mark.parametrize(
    ("how", "policy"),
    [
        (SOFT, None),
        (SOFT, ChainPolicy()),
        (SOFT, ChainPolicy(one_by_one=True)),
        (Sampling(1.3, top_k=3), ChainPolicy()),
        (Sampling(1.0, top_p=0.8), ChainPolicy(block_size=6)),
    ],
)
def test_answers_weigh_what_enumeration_says(how, policy):
    """All 256 answers of four tokens, against the product of the target's own shares."""
    expected = ChainTarget().sequence_probabilities(PROMPT, 4, lambda logits: probabilities(logits, how))
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-5)
    found = answers(options(how), policy)
    assert all(expected[answer] > 0 for answer in found)
    assert fit(found, expected) > 1e-3


def test_a_shorter_block_draws_from_the_same_distribution():
    expected = ChainTarget().sequence_probabilities(PROMPT, 4, lambda logits: probabilities(logits, SOFT))
    assert fit(answers(options(SOFT, block_size=2), ChainPolicy()), expected) > 1e-3


def bonus_from_the_target(target, drafter, drafts, uniforms, limits):
    num_kept, tokens = judge_drafts(target, drafter, drafts, uniforms, limits)
    place = num_kept.view(-1, 1, 1).expand(-1, 1, target.shape[-1])
    new = draw(target.gather(1, place).squeeze(1), uniforms[:, -1])
    return num_kept, tokens.scatter(1, num_kept[:, None], new[:, None])


def keeps_by_the_target_alone(target, drafter, drafts, uniforms, limits):
    return judge_drafts(target, torch.ones_like(drafter), drafts, uniforms, limits)


def keeps_everything(target, drafter, drafts, uniforms, limits):
    return judge_drafts(target, drafter, drafts, uniforms * 0.5, limits)


@pytest.mark.parametrize("wrong", [bonus_from_the_target, keeps_by_the_target_alone, keeps_everything])
def test_a_wrong_rule_is_seen(wrong, monkeypatch):
    monkeypatch.setattr(sampling, "judge_drafts", wrong)
    expected = ChainTarget().sequence_probabilities(PROMPT, 4, lambda logits: probabilities(logits, SOFT))
    assert fit(answers(options(SOFT), ChainPolicy()), expected) < ALARM


def test_a_drafter_that_hides_what_it_drew_from_is_seen():
    class Secret(ChainPolicy):
        def draft(self, anchor_ids, positions, call):
            super().draft(anchor_ids, positions, call)  # what it says it drew from
            return torch.zeros(len(anchor_ids), call.size - 1, dtype=torch.int64)

    expected = ChainTarget().sequence_probabilities(PROMPT, 4, lambda logits: probabilities(logits, SOFT))
    assert fit(answers(options(SOFT), Secret()), expected) < ALARM


def test_samples_do_not_depend_on_the_other_prompts():
    prompts = [(1, 2), (3, 0, 1), (2, 2), (0, 1, 2, 3)]
    how = options(SOFT, max_new_tokens=9, batch_size=3)
    together = decode_speculative(ChainTarget(), ChainPolicy(), prompts, how)
    alone = [decode_speculative(ChainTarget(), ChainPolicy(), [prompt], how)[0] for prompt in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    other = decode_speculative(ChainTarget(), ChainPolicy(), prompts, options(SOFT, max_new_tokens=9, seed=8))
    assert [one.tokens for one in together] != [one.tokens for one in other]


def test_a_drafter_that_knows_the_target_is_always_kept():
    class Twin(ChainPolicy):
        before: torch.Tensor

        def draft(self, anchor_ids, positions, call):
            return call.choose(ChainTarget().table[self.before, anchor_ids][:, None])

        def extend(self, features, positions, valid):
            """Block size 2, so the token before an anchor is the prompt's last, then the anchor's predecessor."""

    class Told(ChainTarget):
        def decode_step(self, input_ids, positions, cache, logits_at=None, branches=None):
            out = super().decode_step(input_ids, positions, cache, logits_at, branches)
            self.cache = cache
            return out

    target, policy = Told(), Twin(block_size=2)
    original = rows.RowBatch._draft

    def show(self, *given):
        places = torch.tensor([row.start - 1 for row in self._lanes])
        policy.before = target.cache.ids.gather(1, places[:, None])[:, 0]
        return original(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows.RowBatch, "_draft", show)
        found = decode_speculative(target, policy, [PROMPT] * 50, options(SOFT, max_new_tokens=9))
    assert all(one.accepted == (2, 2, 2, 2) for one in found)


def test_uniform_numbers_are_what_the_seed_says():
    """The same prompt several times: several samples, and the same ones again."""
    first, again = (decode_plain(ChainTarget(), [PROMPT] * 8, options(SOFT, max_new_tokens=12)) for _ in range(2))
    assert first == again
    assert len({one.tokens for one in first}) > 4
    assert all(len(set(pair)) == 2 for pair in itertools.pairwise(one.tokens for one in first[:3]))
