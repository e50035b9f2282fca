"""Are sampled answers drawn from the target's own distribution? One statistical test for any target and any answers.

Every token of an answer is turned into a number that is uniform on [0, 1] if, and only if, the token was drawn from the
target's distribution behind the tokens before it: the weight of all tokens that are more likely, plus a random share of
its own (the probability integral transform, randomised because tokens are discrete). These numbers are independent too,
so answers of any length, to any prompts, go into one chi-square test. Numbers that crowd near 0 mean that likely tokens
come too often, near 1 that unlikely ones do.

Legend: R rows, T tokens per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helixctl.decoding.decoded import Decoded
from helixctl.decoding.policy import DecodeTarget, padded_rows
from helixctl.decoding.sampling import Sampling, probabilities

NUM_BINS = 20
ROWS = 32
"""Answers that go through the target together."""
TOKENS = 16
"""Tokens of each that go together: bounds the memory for distributions over a large vocabulary."""
ALARM = 1e-4
"""A true sampler gives a smaller p-value once in ten thousand tests."""


@dataclass(frozen=True)
class SampleCheck:
    """What the test found."""

    num_tokens: int
    chi_square: float
    """Of the counts in NUM_BINS bins of equal width."""
    p_value: float
    """How often a sampler that is right shows at least such a deviation."""
    impossible: int
    """Tokens to which the target gives no weight at all: cut by top_k or top_p. Rounding may move a token across the
    cut, in low precision; they count as least likely."""

    @property
    def holds(self) -> bool:
        """No deviation beyond chance."""
        return self.p_value >= ALARM


@torch.no_grad()
def check_samples(
    target: DecodeTarget, answers: Sequence[Decoded], sampling: Sampling, *, seed: int = 0
) -> SampleCheck:
    """Test `answers`, which were drawn with `sampling` in whatever way, against what `target` gives for their tokens.

    Args:
        target: the model, in the dtype that answered.
        answers: at least one.
        sampling: what the answers are said to be drawn from.
        seed: of the random shares, so that a test can be repeated.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers, impossible = [], 0
    for start in range(0, len(answers), ROWS):
        for logits, tokens, valid in _replay(target, answers[start : start + ROWS]):
            shares = probabilities(logits, sampling)
            own = shares.gather(-1, tokens.unsqueeze(-1))  # [R, T, 1]
            above = (shares * (shares > own)).sum(-1)
            tied = (shares * (shares == own)).sum(-1)
            chance = torch.rand(tokens.shape, generator=generator).to(tokens.device)
            numbers.append((above + chance * tied)[valid].cpu())  # a measurement: it may synchronise
            impossible += int((own.squeeze(-1)[valid] == 0).sum())
    return _chi_square(torch.cat(numbers), impossible)


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """Probability that a chi-square variable with so many degrees of freedom is at least `statistic`."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _chi_square(numbers: Tensor, impossible: int) -> SampleCheck:
    bins = (numbers.double() * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    counts = torch.bincount(bins, minlength=NUM_BINS).double()
    expected = len(numbers) / NUM_BINS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return SampleCheck(len(numbers), statistic, chi_square_p_value(statistic, NUM_BINS - 1), impossible)


def _replay(target: DecodeTarget, answers: Sequence[Decoded]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Logits [R, T, V] of the target for tokens [R, T] of the answers, and which of these exist, [R, T] bool."""
    prompts, lengths = padded_rows([answer.prompt_ids for answer in answers], target.device)
    tokens, counts = padded_rows([answer.tokens for answer in answers], target.device)
    cache = target.new_cache(len(answers), prompts.shape[1] + tokens.shape[1])
    columns = torch.arange(tokens.shape[1], device=target.device)
    valid = columns < counts[:, None]
    positions = torch.arange(prompts.shape[1], device=target.device).expand_as(prompts)
    logits, _ = target.decode_step(prompts, positions, cache, logits_at=lengths - 1)
    yield logits, tokens[:, :1], valid[:, :1]
    for start in range(0, tokens.shape[1] - 1, TOKENS):
        fed = columns[start : min(start + TOKENS, tokens.shape[1] - 1)]
        logits, _ = target.decode_step(tokens[:, fed], lengths[:, None] + fed, cache)
        yield logits, tokens[:, fed + 1], valid[:, fed + 1]
