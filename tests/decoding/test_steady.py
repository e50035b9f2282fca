"""The decoder of fixed shapes gives what the slow loop gives: on fakes for all inputs, on real targets, on a GPU."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helixctl.decoding import steady_work
from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.speculative import decode_plain
from helixctl.decoding.steady import SteadyDecoder
from helixctl.errors import UsageError
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.decoding.fakes import FakeTarget, SteadyFake
from tests.tiny import save_tiny, tiny_gemma3, tiny_llama

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [30, 31], [40, 41, 42, 43, 44]]


def answers(decoder, prompts, options, **more):
    found = dict(decoder.stream(prompts, options, **more))
    assert sorted(found) == list(range(len(prompts)))
    return [found[i] for i in range(len(prompts))]


@settings(max_examples=40)
@given(
    prompts=st.lists(st.lists(st.integers(2, 10), min_size=1, max_size=9), max_size=20),
    stop_ids=st.frozensets(st.integers(0, 10), max_size=3),
    max_new_tokens=st.integers(1, 30),
    batch_size=st.integers(1, 7),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_answers_are_those_of_the_slow_loop(prompts, stop_ids, max_new_tokens, batch_size, temperature):
    options = DecodeOptions(max_new_tokens, stop_ids, batch_size=batch_size, max_len=38, temperature=temperature)
    assert answers(SteadyDecoder(SteadyFake()), prompts, options) == decode_plain(FakeTarget(), prompts, options)


def test_rows_are_refilled_and_kept_for_the_next_set():
    target = SteadyFake(script=lambda prefix: 1 if len(prefix) > 12 else 5)
    decoder = SteadyDecoder(target)
    options = DecodeOptions(max_new_tokens=20, stop_ids=frozenset([1]), batch_size=8)
    for prompts in ([[3] * (2 + i % 7) for i in range(40)], [[4, 4]] * 8, [[4, 4]] * 11):
        answers(decoder, prompts, options)
        assert {rows for rows, width in target.calls if width == 1} <= {8}
    first = decoder._rows
    list(decoder.stream([[3]], options))
    assert decoder._rows is first
    list(decoder.stream([[3] * 200], options))
    assert decoder._rows is not first


def test_few_wasted_steps():
    """The host looks every few steps; a full batch computes hardly more than its answers."""
    target = SteadyFake(script=lambda prefix: 5)
    result = answers(SteadyDecoder(target), [[3, 4]] * 64, DecodeOptions(max_new_tokens=33, batch_size=16))
    num_steps = sum(width == 1 for _, width in target.calls)
    assert sum(len(answer.tokens) - 1 for answer in result) == 64 * 32 == 16 * num_steps


def test_progress_counts_what_is_done_and_ends_with_all():
    seen = []
    result = answers(
        SteadyDecoder(SteadyFake()), PROMPTS, DecodeOptions(17, batch_size=2), on_progress=lambda now: seen.append(now)
    )
    assert (seen[-1].num_done, seen[-1].num_prompts) == (5, 5)
    assert seen[-1].num_tokens == sum(len(answer.tokens) for answer in result)
    tokens = [now.num_tokens for now in seen]
    assert tokens == sorted(tokens)


def test_a_stream_that_is_left_early_harms_the_next_one_not():
    decoder, options = SteadyDecoder(SteadyFake()), DecodeOptions(9, batch_size=2)
    next(decoder.stream(PROMPTS, options))
    assert answers(decoder, PROMPTS, options) == decode_plain(FakeTarget(), PROMPTS, options)


def test_prompts_without_room_are_refused():
    with pytest.raises(UsageError, match="prompt 1 has 9 tokens"):
        list(SteadyDecoder(SteadyFake()).stream([[3], [3] * 9], DecodeOptions(9, max_len=9)))
    assert list(SteadyDecoder(SteadyFake()).stream([], DecodeOptions(9))) == []


def generated(model, prompt, num_tokens):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_greedy_answers_equal_plain_generate(build, tmp_path, monkeypatch):
    """In float32, token for token; prompts of all lengths, more of them than rows, prefilled in several groups."""
    monkeypatch.setattr(steady_work, "PREFILL_TOKENS", 16)
    model = build()
    target = Target.load(TargetOptions(model=str(save_tiny(model, tmp_path))), [0, 2], "cpu", torch.float32)
    decoder = SteadyDecoder(target)
    for batch_size in (8, 3):
        result = answers(decoder, PROMPTS * 2, DecodeOptions(max_new_tokens=21, batch_size=batch_size))
        expected = [generated(model, prompt, 21) for prompt in PROMPTS]
        assert [list(answer.tokens) for answer in result] == expected * 2


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@pytest.mark.gpu
def test_captured_steps_equal_the_slow_loop_on_a_gpu(build, tmp_path, caplog):
    target = Target.load(TargetOptions(model=str(save_tiny(build(), tmp_path))), [0, 2], "cuda", torch.float32)
    for temperature in (0.0, 1.0):
        options = DecodeOptions(max_new_tokens=40, batch_size=8, temperature=temperature)
        expected = decode_plain(target, PROMPTS * 4, options)
        with caplog.at_level(logging.WARNING):
            assert answers(SteadyDecoder(target), PROMPTS * 4, options) == expected
    assert not caplog.records, "captured, not run step by step"


def wait_for_the_device(_layer, _inputs, output):
    output.sum().item()


@pytest.mark.gpu
def test_a_model_that_waits_for_the_device_is_decoded_without_a_graph(tmp_path, caplog):
    target = Target.load(TargetOptions(model=str(save_tiny(tiny_llama(), tmp_path))), [0], "cuda", torch.float32)
    options = DecodeOptions(max_new_tokens=9, batch_size=2)
    expected = decode_plain(target, PROMPTS, options)
    target.layers[0].register_forward_hook(wait_for_the_device)
    with caplog.at_level(logging.WARNING):
        assert answers(SteadyDecoder(target), PROMPTS, options) == expected
    assert "cannot be captured" in caplog.text
