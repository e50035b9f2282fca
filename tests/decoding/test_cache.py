from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helixctl.decoding.cache import RaggedCache
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.tiny import save_tiny, tiny_gemma2, tiny_gemma3, tiny_gpt_oss, tiny_llama, tiny_mistral

BUILDERS = (tiny_llama, tiny_gemma3, tiny_mistral, tiny_gemma2, tiny_gpt_oss)
TAPS = (0, 2)
LENGTH = 80  # more than the cache grows by


@functools.cache
def pair(builder: Callable[[], Any]) -> tuple[Any, Target]:
    """The plain model and the target made of it."""
    model = builder()
    with tempfile.TemporaryDirectory() as folder:
        options = TargetOptions(model=str(save_tiny(model, Path(folder))))
        target = Target.load(options, TAPS, "cpu", torch.float32)
    model.set_attn_implementation("eager")
    return model, target


def sequences(num_rows: int, seed: int) -> Tensor:
    return torch.randint(3, 128, (num_rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def prefill(target: Target, ids: Tensor, lengths: list[int]) -> tuple[RaggedCache, Tensor]:
    """Right-padded prompts of different lengths; logits of each row's last token."""
    cache = target.new_cache(len(ids), LENGTH)
    width = max(lengths)
    padded = ids[:, :width].clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 2
    positions = torch.arange(width).expand(len(ids), width)
    logits, _ = target.decode_step(padded, positions, cache, logits_at=torch.tensor(lengths) - 1)
    return cache, logits


def check(target_logits: Tensor, states: list[Tensor], model: Any, ids: Tensor, starts: list[int]) -> None:
    """A step's logits [R, T, V] and features equal a whole forward over each row alone."""
    for row, start in enumerate(starts):
        end = start + target_logits.shape[1]
        want = model(ids[row : row + 1, :end], output_hidden_states=True)
        torch.testing.assert_close(target_logits[row], want.logits[0, start:], atol=1e-3, rtol=1e-4)
        assert torch.equal(target_logits[row].argmax(-1), want.logits[0, start:].argmax(-1))
        for tap, state in zip(TAPS, states, strict=True):
            torch.testing.assert_close(state[row], want.hidden_states[tap + 1][0, start:], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("builder", BUILDERS)
def test_ragged_rows_equal_each_row_alone(builder: Callable[[], Any]) -> None:
    model, target = pair(builder)
    ids, lengths = sequences(3, 0), [3, 57, 9]
    cache, logits = prefill(target, ids, lengths)
    for row, length in enumerate(lengths):
        want = model(ids[row : row + 1, :length]).logits[0, -1]
        torch.testing.assert_close(logits[row, 0], want, atol=1e-3, rtol=1e-4)
    for _ in range(3):
        positions = torch.tensor(lengths)[:, None] + torch.arange(4)
        logits, states = target.decode_step(ids.gather(1, positions), positions, cache)
        check(logits, states, model, ids, lengths)
        lengths = [length + 4 for length in lengths]


steps = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(0, 5), min_size=3, max_size=3)), min_size=1, max_size=6
)


@settings(max_examples=15, deadline=None)
@given(steps=steps, seed=st.integers(0, 999), builder=st.sampled_from((tiny_llama, tiny_gemma3)))
def test_rejected_tokens_are_never_seen_again(
    steps: list[tuple[int, list[int]]], seed: int, builder: Callable[[], Any]
) -> None:
    """Each step writes wrong tokens from a place that each row accepts for itself; the next step starts there."""
    model, target = pair(builder)
    ids, starts = sequences(3, seed), [2, 60, 4]
    cache, _ = prefill(target, ids, starts)
    for width, kept in steps:
        if max(starts) + width > LENGTH:
            break
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        tokens = ids.gather(1, positions)
        accepted = [min(k, width) for k in kept]
        for row, number in enumerate(accepted):
            tokens[row, number:] = (tokens[row, number:] + 1) % 128
        target.decode_step(tokens, positions, cache)
        starts = [start + number for start, number in zip(starts, accepted, strict=True)]
    last = torch.tensor([[min(start, LENGTH - 1)] for start in starts])
    logits, states = target.decode_step(ids.gather(1, last), last, cache)
    check(logits, states, model, ids, last[:, 0].tolist())


def test_greedy_decoding_equals_generate() -> None:
    model, target = pair(tiny_llama)
    prompts = sequences(2, 5)
    lengths = [4, 11]
    cache, logits = prefill(target, prompts, lengths)
    answers: list[list[int]] = [[], []]
    for _ in range(10):
        tokens = logits[:, -1].argmax(-1)
        for row in range(2):
            answers[row].append(int(tokens[row]))
        logits, _ = target.decode_step(tokens[:, None], torch.tensor(lengths)[:, None], cache)
        lengths = [length + 1 for length in lengths]
    for row, length in enumerate((4, 11)):
        prompt = prompts[row : row + 1, :length]
        want = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=10, eos_token_id=None
        )
        assert answers[row] == want[0, length:].tolist()


def test_long_steps_take_the_other_path_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = pair(tiny_gemma3)
    ids, lengths = sequences(3, 2), [12, 12, 12]
    positions = torch.tensor(lengths)[:, None] + torch.arange(6)
    cache, _ = prefill(target, ids, lengths)
    short, _ = target.decode_step(ids.gather(1, positions), positions, cache)
    monkeypatch.setattr("helixctl.models.attention.FEW_QUERIES", 0)
    other, _ = target.decode_step(ids.gather(1, positions), positions, cache)
    torch.testing.assert_close(short, other, atol=1e-4, rtol=1e-4)


def test_select_and_put_move_rows() -> None:
    model, target = pair(tiny_llama)
    ids = sequences(4, 3)
    cache, _ = prefill(target, ids, [5, 9, 7, 4])
    cache.select(torch.tensor([2, 0]))
    fresh = target.new_cache(1, 6)
    target.decode_step(ids[3:, :6], torch.arange(6)[None], fresh)
    cache.put(torch.tensor([1]), fresh)
    order, starts = [2, 3], [7, 6]
    positions = torch.tensor(starts)[:, None] + torch.arange(3)
    logits, states = target.decode_step(ids[order].gather(1, positions), positions, cache)
    check(logits, states, model, ids[order], starts)


def test_put_into_a_cache_that_holds_nothing_yet() -> None:
    model, target = pair(tiny_llama)
    ids = sequences(1, 4)
    fresh = target.new_cache(1, 6)
    target.decode_step(ids[:, :6], torch.arange(6)[None], fresh)
    cache = target.new_cache(2, LENGTH)
    cache.put(torch.tensor([1]), fresh)
    both, positions = ids.expand(2, -1), torch.tensor([[0], [6]])
    logits, states = target.decode_step(both.gather(1, positions), positions, cache)
    check(logits, states, model, both, [0, 6])


def test_positions_beyond_the_cache_are_refused() -> None:
    with pytest.raises(AssertionError, match="position 8 in a cache of 8"):
        RaggedCache(1, 8).at(torch.tensor([[8]]))
