from __future__ import annotations

import dataclasses

import pytest
import torch

from helixctl.decoding.losslessness import compare_greedy, measure_noise
from helixctl.decoding.speculative import DecodeOptions, decode_plain, decode_speculative
from helixctl.decoding.timing import time_plain, time_speculative
from tests.decoding.fakes import FakePolicy, FakeTarget, sometimes

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8]]
OPTIONS = DecodeOptions(max_new_tokens=6, record_margins=True)


def answers():
    return decode_plain(FakeTarget(), PROMPTS, OPTIONS)


def changed(answer, position, margin):
    """The plain answer with `margin` at `position`, and another answer that differs there."""
    margins = list(answer.margins)
    margins[position] = margin
    tokens = list(answer.tokens)
    tokens[position] += 1
    return dataclasses.replace(answer, margins=tuple(margins)), dataclasses.replace(answer, tokens=tuple(tokens))


def test_equal_answers_are_identical():
    plain = answers()
    target = FakeTarget()
    speculative = decode_speculative(target, FakePolicy(target, 3, sometimes(0.5)), PROMPTS, OPTIONS)
    result = compare_greedy(plain, speculative, 0.0)
    assert (result.identical, result.near_ties, result.different) == (3, 0, 0)
    assert result.lossless and result.differences == ()


@pytest.mark.parametrize(("margin", "kind"), [(0.01, "near_tie"), (0.5, "different"), (2.0, "different")])
def test_a_difference_counts_by_the_gap_at_its_first_place(margin, kind):
    plain = answers()
    one, other = changed(plain[1], 2, margin)
    result = compare_greedy([plain[0], one, plain[2]], [plain[0], other, plain[2]], 0.5)
    assert (result.identical, result.near_ties, result.different) == (2, kind == "near_tie", kind == "different")
    [difference] = result.differences
    assert (difference.prompt, difference.position, difference.kind) == (1, 2, kind)
    assert difference.plain_token is not None and difference.speculative_token == difference.plain_token + 1
    assert difference.gap == margin


@pytest.mark.parametrize("shorter", ["plain", "speculative"])
def test_a_shorter_answer_is_different(shorter):
    [plain, *_] = answers()
    cut = dataclasses.replace(plain, tokens=plain.tokens[:4], margins=plain.margins[:4])
    pair = (cut, plain) if shorter == "plain" else (plain, cut)
    result = compare_greedy([pair[0]], [pair[1]], 1e9)
    assert result.different == 1
    assert result.differences[0].position == 4


class NoisyTarget(FakeTarget):
    """Adds `noise` to the best logit in forwards of more than one token, outside the prefill."""

    noise = 0.25

    def decode_step(self, input_ids, positions, cache, logits_at=None, branches=None):
        logits, features = super().decode_step(input_ids, positions, cache, logits_at, branches)
        if input_ids.shape[1] > 1 and logits_at is None:
            logits += self.noise * logits
        return logits, features


def test_noise_is_the_largest_change_of_the_gap_of_the_best_two():
    plain = answers()
    assert measure_noise(FakeTarget(), plain, 3) == 0.0
    assert measure_noise(NoisyTarget(), plain, 3) == pytest.approx(0.25)
    assert measure_noise(NoisyTarget(), [], 3) == 0.0


def test_noise_of_a_row_alone_counts():
    """Products of one row are the ones that round differently on a CPU; a batch shrinks to one row at its end."""

    class NoisyAlone(FakeTarget):
        def decode_step(self, input_ids, positions, cache, logits_at=None, branches=None):
            logits, features = super().decode_step(input_ids, positions, cache, logits_at, branches)
            if input_ids.shape == (1, 1):
                logits += 0.75 * logits
            return logits, features

    assert measure_noise(NoisyAlone(), answers(), 3) == pytest.approx(0.75)


def test_noise_of_the_prefill_and_of_every_row_alone_counts():
    """Two decodes of the same prompts need not prefill the same ones together."""

    class NoisyPrefill(FakeTarget):
        def decode_step(self, input_ids, positions, cache, logits_at=None, branches=None):
            logits, features = super().decode_step(input_ids, positions, cache, logits_at, branches)
            if logits_at is not None and input_ids.tolist() == [last]:
                logits += 0.5 * logits
            return logits, features

    last = list(answers()[-1].prompt_ids)
    assert measure_noise(NoisyPrefill(), answers(), 3) == pytest.approx(0.5)


def test_noise_ignores_what_lies_beyond_an_answer():
    class NoisyLate(NoisyTarget):
        def decode_step(self, input_ids, positions, cache, logits_at=None, branches=None):
            logits, features = FakeTarget.decode_step(self, input_ids, positions, cache, logits_at, branches)
            if input_ids.shape[1] > 1 and logits_at is None:
                logits += torch.where(positions >= 3, 9.0, 0.0).unsqueeze(-1) * logits
            return logits, features

    [answer] = decode_plain(FakeTarget(), [[1]], DecodeOptions(max_new_tokens=2))
    longer = decode_plain(FakeTarget(), [[1]], DecodeOptions(max_new_tokens=2))[0]
    assert measure_noise(NoisyLate(), [answer, dataclasses.replace(longer, tokens=longer.tokens[:1])], 2) == 0.0


def test_timing_gives_answers_tokens_and_seconds():
    target = FakeTarget()
    plain = time_plain(target, PROMPTS, OPTIONS)
    speculative = time_speculative(target, FakePolicy(target, 3, sometimes(0.5)), PROMPTS, OPTIONS)
    assert [one.tokens for one in plain.decoded] == [one.tokens for one in speculative.decoded]
    assert plain.num_tokens == speculative.num_tokens == 18
    assert plain.elapsed_s > 0 and plain.tokens_per_s == plain.num_tokens / plain.elapsed_s
