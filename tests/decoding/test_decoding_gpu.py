"""Decoding on a GPU: the CPU's answers, one look at the device per forward of the target, samples of the right kind."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.distribution import check_samples
from helixctl.decoding.sampling import Sampling
from helixctl.decoding.speculative import decode_plain, decode_speculative
from helixctl.models.drafters.dflash import plugin
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.models.drafters.dflash.builders import TAPS, make_model
from tests.tiny import save_tiny, tiny_llama

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13, 14, 15]]


def make(folder: Any, device: str) -> tuple[Target, Any]:
    """A random target and a random drafter for it."""
    options = TargetOptions(model=str(save_tiny(tiny_llama(vocab_size=96, num_hidden_layers=8), folder)))
    target = Target.load(options, TAPS, device, torch.float32)
    return target, plugin.policy(make_model().to(device), target.shared)


@pytest.mark.gpu
@pytest.mark.parametrize(("block_size", "tree_budget"), [(None, None), (3, None), (None, 24)])
def test_answers_are_those_of_a_cpu(tmp_path, block_size, tree_budget):
    options = DecodeOptions(max_new_tokens=40, batch_size=3, block_size=block_size, tree_budget=tree_budget)
    cpu, gpu = make(tmp_path / "cpu", "cpu"), make(tmp_path / "gpu", "cuda:0")
    expected = decode_speculative(*cpu, PROMPTS, options)
    found = decode_speculative(*gpu, PROMPTS, options)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.accepted for one in found] == [one.accepted for one in expected]
    assert [one.tokens for one in decode_plain(gpu[0], PROMPTS, options)] == [one.tokens for one in expected]


@pytest.mark.gpu
@pytest.mark.parametrize("tree_budget", [None, 24])
def test_the_host_looks_at_the_device_once_per_forward(tmp_path, monkeypatch, tree_budget):
    target, policy = make(tmp_path, "cuda:0")
    options, calls = DecodeOptions(max_new_tokens=40, tree_budget=tree_budget), []
    decode_speculative(target, policy, PROMPTS, options)  # whatever waits once in a process
    step = target.decode_step

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return step(*given, **named)

    monkeypatch.setattr(target, "decode_step", counted)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            decode_speculative(target, policy, PROMPTS, options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in seen if "called a synchronizing" in str(one.message)]
    assert len(waits) == len(calls) > 10, waits


@pytest.mark.gpu
@pytest.mark.parametrize("how", [Sampling(0.9), Sampling(1.0, top_k=20, top_p=0.9)])
@pytest.mark.parametrize("tree_budget", [None, 24])
def test_samples_have_the_targets_distribution(tmp_path, how, tree_budget):
    target, policy = make(tmp_path, "cuda:0")
    sampled = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p, "seed": 1}
    options = DecodeOptions(max_new_tokens=60, batch_size=64, tree_budget=tree_budget, **sampled)
    answers = decode_speculative(target, policy, PROMPTS * 16, options)
    found = check_samples(target, answers, how)
    assert found.num_tokens == 64 * 60 and found.p_value > 0.001, found
    assert not check_samples(target, answers, Sampling(how.temperature * 1.3)).holds
