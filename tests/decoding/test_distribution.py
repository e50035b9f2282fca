"""The test for samples of a real target: uniform where the sampler is right, alarmed where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helixctl.decoding import sampling
from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.distribution import check_samples, chi_square_p_value
from helixctl.decoding.sampling import Sampling, judge_drafts
from helixctl.decoding.speculative import decode_plain, decode_speculative
from tests.decoding.fakes import ChainPolicy, ChainTarget

PROMPTS = [(1, 2), (3, 0, 1), (2, 2)] * 50
OPTIONS = DecodeOptions(max_new_tokens=30, temperature=0.8, batch_size=150, seed=1)


def test_p_values_are_those_of_the_tables():
    for statistic, degrees, expected in ((3.841, 1, 0.05), (30.144, 19, 0.05), (9.21, 2, 0.01), (0.0, 5, 1.0)):
        assert chi_square_p_value(statistic, degrees) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("how", [Sampling(0.8), Sampling(1.2, top_k=2), Sampling(1.0, top_p=0.7)])
def test_right_samples_pass_with_and_without_a_drafter(how):
    options = replace(OPTIONS, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p)
    for answers in (
        decode_plain(ChainTarget(), PROMPTS, options),
        decode_speculative(ChainTarget(), ChainPolicy(), PROMPTS, options),
    ):
        found = check_samples(ChainTarget(), answers, how)
        assert found.num_tokens == 150 * 30 and found.impossible == 0
        assert found.holds and found.p_value > 0.01


def test_another_temperature_and_cut_tokens_are_seen():
    answers = decode_plain(ChainTarget(), PROMPTS, OPTIONS)
    assert not check_samples(ChainTarget(), answers, Sampling(1.0)).holds
    cut = check_samples(ChainTarget(), answers, Sampling(0.8, top_k=2))
    assert not cut.holds and cut.impossible > 100


def test_another_target_is_seen():
    answers = decode_plain(ChainTarget(), PROMPTS, OPTIONS)
    assert not check_samples(ChainTarget(seed=5), answers, Sampling(0.8)).holds


@pytest.mark.parametrize("fault", ["keeps more than it may", "draws the new token from the target"])
def test_a_wrong_rejection_rule_is_seen(fault, monkeypatch):
    def wrong(target, drafter, drafts, uniforms, limits):
        if fault.startswith("keeps"):
            return judge_drafts(target, drafter, drafts, uniforms * 0.5, limits)
        num_kept, tokens = judge_drafts(target, drafter, drafts, uniforms, limits)
        place = num_kept.view(-1, 1, 1).expand(-1, 1, target.shape[-1])
        new = sampling.draw(target.gather(1, place).squeeze(1), uniforms[:, -1])
        return num_kept, tokens.scatter(1, num_kept[:, None], new[:, None])

    monkeypatch.setattr(sampling, "judge_drafts", wrong)
    found = check_samples(
        ChainTarget(), decode_speculative(ChainTarget(), ChainPolicy(), PROMPTS, OPTIONS), Sampling(0.8)
    )
    assert not found.holds, found


def test_answers_of_any_length_count_once_per_token():
    options = replace(OPTIONS, stop_ids=frozenset({3}), max_new_tokens=40)
    answers = decode_plain(ChainTarget(), PROMPTS, options)
    lengths = {len(one.tokens) for one in answers}
    assert 1 in lengths and len(lengths) > 5
    found = check_samples(ChainTarget(), answers, Sampling(0.8))
    assert found.num_tokens == sum(len(one.tokens) for one in answers) and found.p_value > 0.01


def test_the_same_test_again_gives_the_same_number():
    answers = decode_plain(ChainTarget(), PROMPTS, OPTIONS)
    one, again, other = (check_samples(ChainTarget(), answers, Sampling(0.8), seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    assert torch.is_grad_enabled()
