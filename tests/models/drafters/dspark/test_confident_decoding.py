"""The confidence head cuts blocks of a real target: what comes out is the target's own, on a CPU and on a GPU."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.distribution import check_samples
from helixctl.decoding.fastest import FastestDecoder
from helixctl.decoding.sampling import Sampling
from helixctl.decoding.speculative import decode_plain, decode_speculative
from helixctl.decoding.steady_blocks import SteadySpeculator
from helixctl.models.drafters.dspark import plugin
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.decoding.test_decoding_gpu import PROMPTS
from tests.models.drafters.dflash.builders import TAPS
from tests.models.drafters.dspark.test_dspark import make_model
from tests.tiny import save_tiny, tiny_llama


def make(folder: Any, device: str) -> tuple[Target, Any]:
    """A random target and a random drafter, whose head is sure of some drafts and not of others."""
    options = TargetOptions(model=str(save_tiny(tiny_llama(vocab_size=96, num_hidden_layers=8), folder)))
    target = Target.load(options, TAPS, device, torch.float32)
    return target, plugin.policy(make_model().to(device), target.shared)


def verified(answers: Any) -> set[int]:
    return {count for one in answers for count in one.judged}


def test_greedy_answers_are_plain_decodings_at_any_threshold(tmp_path: Any) -> None:
    target, policy = make(tmp_path, "cpu")
    options = DecodeOptions(max_new_tokens=16, batch_size=3)
    expected = [one.tokens for one in decode_plain(target, PROMPTS, options)]
    lengths = {}
    for threshold in (0.0, 0.1, 0.4, 1.0):
        asked = DecodeOptions(max_new_tokens=16, batch_size=3, confidence_threshold=threshold)
        found = decode_speculative(target, policy, PROMPTS, asked)
        assert [one.tokens for one in found] == expected
        lengths[threshold] = verified(found)
    assert max(lengths[0.0]) == 4 and lengths[1.0] == {0} and len(lengths[0.4]) > 2, lengths


def test_samples_have_the_targets_distribution(tmp_path: Any) -> None:
    target, policy = make(tmp_path, "cpu")
    options = DecodeOptions(max_new_tokens=30, batch_size=64, temperature=0.9, seed=1, confidence_threshold=0.2)
    found = decode_speculative(target, policy, PROMPTS * 16, options)
    assert verified(found) >= {0, 1, 2, 3}
    assert check_samples(target, found, Sampling(0.9)).p_value > 0.001
    assert not check_samples(target, found, Sampling(1.4)).holds


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5])
def test_cycles_of_fixed_shapes_give_the_same(tmp_path: Any, threshold: float) -> None:
    target, policy = make(tmp_path, "cpu")
    options = DecodeOptions(max_new_tokens=8, batch_size=3, confidence_threshold=threshold)
    found = SteadySpeculator(target, policy).decode(PROMPTS, options)
    for one, other in zip(found, decode_speculative(target, policy, PROMPTS, options), strict=True):
        assert (one.tokens, one.accepted, one.judged) == (other.tokens, other.accepted, other.judged)
        for told, expected in zip(one.confidences, other.confidences, strict=True):
            assert told == pytest.approx(expected, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5])
def test_captured_answers_on_a_gpu_are_those_of_a_cpu(tmp_path: Any, caplog: Any, threshold: float) -> None:
    options = DecodeOptions(max_new_tokens=40, batch_size=3, confidence_threshold=threshold)
    cpu, gpu = make(tmp_path / "cpu", "cpu"), make(tmp_path / "gpu", "cuda:0")
    expected = [one.tokens for one in decode_speculative(*cpu, PROMPTS, options)]
    with caplog.at_level(logging.WARNING):
        found = FastestDecoder(*gpu).drafted(PROMPTS, options)
    assert not caplog.records, "captured, not launched one by one"
    assert (
        [one.tokens for one in found] == [one.tokens for one in decode_speculative(*gpu, PROMPTS, options)] == expected
    )
    assert [one.tokens for one in decode_plain(gpu[0], PROMPTS, options)] == expected


@pytest.mark.gpu
def test_samples_on_a_gpu_have_the_targets_distribution(tmp_path: Any) -> None:
    target, policy = make(tmp_path, "cuda:0")
    options = DecodeOptions(max_new_tokens=60, batch_size=64, temperature=0.9, seed=1, confidence_threshold=0.2)
    found = FastestDecoder(target, policy).drafted(PROMPTS * 16, options)
    assert len(verified(found)) > 2 and check_samples(target, found, Sampling(0.9)).p_value > 0.001


@pytest.mark.gpu
def test_the_host_looks_at_the_device_twice_per_cycle(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the lengths and at the tokens; once where no draft has room."""
    target, policy = make(tmp_path, "cuda:0")
    options = DecodeOptions(max_new_tokens=40, confidence_threshold=0.2)
    decode_speculative(target, policy, PROMPTS, options)  # whatever waits once in a process
    calls: list[int] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            calls.append(1)
            return function(*given, **named)

        return call

    monkeypatch.setattr(target, "decode_step", counted(target.decode_step))
    monkeypatch.setattr(policy, "draft", counted(policy.draft))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            decode_speculative(target, policy, PROMPTS, options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in seen if "called a synchronizing" in str(one.message)]
    assert len(waits) == len(calls) > 20, waits
