"""Is speculative output what plain greedy decoding gives? Compares the two, and measures the rounding that may differ.

A target's logits for one token differ in rounding between a forward of one token and a forward of a block, because
matrix products of other shapes add up in another order. In float32 this is too small to change a token; in bfloat16 it
decides between two tokens whose logits are nearly equal.

Legend: R rows, T tokens per row, B block_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from helixctl.decoding.decoded import Decoded
from helixctl.decoding.policy import DecodeTarget, padded_rows


@dataclass(frozen=True)
class Difference:
    """The first place where the answers to a prompt part."""

    prompt: int
    """Index of the prompt."""
    position: int
    """Index into the answers' tokens."""
    plain_token: int | None
    """None where the plain answer has ended."""
    speculative_token: int | None
    gap: float
    """Gap between plain decoding's two best logits there."""
    kind: Literal["near_tie", "different"]


@dataclass(frozen=True)
class Losslessness:
    """Counts of prompts. What follows a first difference is not compared: it has another prefix."""

    identical: int
    near_ties: int
    """First difference at a place where plain decoding's two best logits differ by less than `noise`."""
    different: int
    """First difference anywhere else: a fault."""
    noise: float
    differences: tuple[Difference, ...]

    @property
    def lossless(self) -> bool:
        """No answer differs by more than rounding."""
        return self.different == 0


def compare_greedy(plain: Sequence[Decoded], speculative: Sequence[Decoded], noise: float) -> Losslessness:
    """Compare the answers to the same prompts; `plain` must have been decoded with `record_margins`.

    Args:
        plain: answers of `decode_plain`.
        speculative: answers of `decode_speculative` to the same prompts, in the same order.
        noise: what `measure_noise` gave; 0.0 lets no difference pass.
    """
    differences = []
    for index, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        assert one.prompt_ids == other.prompt_ids, "answers to different prompts"
        position = _first_difference(one.tokens, other.tokens)
        if position is not None:
            differences.append(_difference(index, position, one, other, noise))
    near_ties = sum(d.kind == "near_tie" for d in differences)
    return Losslessness(
        identical=len(plain) - len(differences),
        near_ties=near_ties,
        different=len(differences) - near_ties,
        noise=noise,
        differences=tuple(differences),
    )


@torch.no_grad()
def measure_noise(target: DecodeTarget, answers: Sequence[Decoded], block_size: int, *, max_tokens: int = 128) -> float:
    """How much rounding can change the gap between two logits of `target`, measured on prompts and their answers.

    The same tokens go through the target one by one and in blocks of `block_size`, all answers together and every one
    alone: which prompts are prefilled together and how many rows are left differs between two decodes of the same
    prompts, and the products of few rows are those that round differently. Each way has its own cache, so the noise of
    cached keys and values is included. The noise is the largest change, between any two ways, of the gap between a
    token's two best logits. (Over the whole vocabulary gaps change several times as much; that would excuse almost
    anything.)

    Args:
        target: the model, in the dtype that is judged.
        answers: plain answers; their tokens are fed as they are. A few are enough.
        block_size: B, as in the verify forward.
        max_tokens: tokens of each answer that are looked at; 0.0 is returned when there are none.
    """
    if not answers:
        return 0.0
    rows = _Rows(answers, block_size, max_tokens, target.device)
    together = list(range(len(answers)))
    ways = [_Way(target, rows, together, 1), _Way(target, rows, together, block_size)]
    if len(answers) > 1:
        ways += [_Way(target, rows, [0], 1), *(_Way(target, rows, [place], block_size) for place in together)]
    noise = _largest_change(ways, [way.first for way in ways], rows.counts[:, None] > 0)
    for start in range(0, rows.tokens.shape[1], block_size):
        counted = start + torch.arange(block_size, device=target.device) < rows.counts[:, None]  # [R, B]
        noise = max(noise, _largest_change(ways, [way.logits(start) for way in ways], counted))
    return noise


class _Rows:
    """Prompts and answers as tensors padded on the right, and how long they are."""

    def __init__(self, answers: Sequence[Decoded], block_size: int, max_tokens: int, device: torch.device) -> None:
        self.widths = [len(answer.prompt_ids) for answer in answers]
        self.prompts, self.lengths = padded_rows([answer.prompt_ids for answer in answers], device)
        self.tokens, self.counts = padded_rows([answer.tokens[:max_tokens] for answer in answers], device)
        self.max_len = self.prompts.shape[1] + self.tokens.shape[1] + block_size
        self.block_size = block_size


class _Way:
    """Some rows on their way through the target, `step` tokens per forward."""

    def __init__(self, target: DecodeTarget, rows: _Rows, places: list[int], step: int) -> None:
        self._target = target
        self._rows = rows
        self._step = step
        self.places = torch.tensor(places, device=target.device)
        self._cache = target.new_cache(len(places), rows.max_len)
        prompts = rows.prompts[self.places, : max(rows.widths[place] for place in places)]
        positions = torch.arange(prompts.shape[1], device=target.device).expand_as(prompts)
        self.first, _ = target.decode_step(
            prompts, positions, self._cache, logits_at=rows.lengths[self.places] - 1
        )  # [rows, 1, V]

    def logits(self, start: int) -> Tensor:
        """Logits [rows, T, V] of the block of answer tokens from `start` on; blocks must be asked for in order."""
        rows, parts = self._rows, []
        end = min(start + rows.block_size, rows.tokens.shape[1])
        for first in range(start, end, self._step):
            columns = torch.arange(first, min(first + self._step, end), device=self._target.device)
            input_ids = rows.tokens[self.places][:, columns]
            positions = rows.lengths[self.places, None] + columns
            parts.append(self._target.decode_step(input_ids, positions, self._cache)[0])
        return torch.cat(parts, dim=1)


def _largest_change(ways: Sequence[_Way], logits: Sequence[Tensor], counted: Tensor) -> float:
    """Largest difference, between any two ways, of the gap of a token's two best logits; `counted` [R, >= T] bool.

    The first way has all rows, and says which two logits are the best.
    """
    best = logits[0].topk(2, dim=-1).indices  # [R, T, 2]
    low = torch.full(best.shape[:2], float("inf"), device=best.device)
    high = -low
    for way, found in zip(ways, logits, strict=True):
        pair = found.gather(-1, best[way.places]).float()
        gap = pair[..., 0] - pair[..., 1]
        low[way.places] = torch.minimum(low[way.places], gap)
        high[way.places] = torch.maximum(high[way.places], gap)
    change = (high - low)[counted[:, : best.shape[1]]]
    return change.max().item() if len(change) else 0.0  # a measurement: it may synchronise


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def _difference(index: int, position: int, plain: Decoded, speculative: Decoded, noise: float) -> Difference:
    assert len(plain.margins) == len(plain.tokens), "decode with record_margins"
    inside = position < len(plain.tokens) and position < len(speculative.tokens)
    gap = plain.margins[position] if inside else float("inf")
    return Difference(
        prompt=index,
        position=position,
        plain_token=plain.tokens[position] if position < len(plain.tokens) else None,
        speculative_token=speculative.tokens[position] if position < len(speculative.tokens) else None,
        gap=gap,
        kind="near_tie" if gap < noise else "different",
    )
