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
from helixctl.decoding.policy import DecodeTarget, RowCache


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

    The same tokens go through the target one by one and in blocks of `block_size`, each way with its own cache, so the
    noise of cached keys and values is included. With D = the difference of the two logit vectors of a token, the gap
    between two logits changes by at most max(D) - min(D) over the vocabulary; the largest over all tokens is the noise.

    Args:
        target: the model, in the dtype that is judged.
        answers: plain answers; their tokens are fed as they are.
        block_size: B, as in the verify forward.
        max_tokens: tokens of each answer that are looked at; 0.0 is returned when there are none.
    """
    sequences = [(answer.prompt_ids, answer.tokens[:max_tokens]) for answer in answers]
    if not sequences:
        return 0.0
    longest = max(len(tokens) for _, tokens in sequences)
    max_len = max(len(prompt) for prompt, _ in sequences) + longest + block_size
    prompts, lengths = _padded([prompt for prompt, _ in sequences], target.device)
    tokens, counts = _padded([tokens for _, tokens in sequences], target.device)
    caches = [target.new_cache(len(sequences), max_len) for _ in range(2)]
    positions = torch.arange(prompts.shape[1], device=target.device).expand_as(prompts)
    for cache in caches:
        target.decode_step(prompts, positions, cache, logits_at=lengths - 1)
    noise = 0.0
    for start in range(0, longest, block_size):
        block = tokens[:, start : start + block_size]  # [R, T]
        offsets = torch.arange(start, start + block.shape[1], device=target.device)
        spread = _logit_spread(target, block, lengths[:, None] + offsets, (caches[0], caches[1]))  # [R, T]
        noise = max(noise, spread[offsets < counts[:, None]].max().item())  # a measurement: a sync per block is fine
    return noise


def _logit_spread(target: DecodeTarget, block: Tensor, positions: Tensor, caches: tuple[RowCache, RowCache]) -> Tensor:
    """Per token, max - min over V of the difference between block-wise and single-token logits: [R, T] float32."""
    whole, _ = target.decode_step(block, positions, caches[0])  # [R, T, V]
    spreads = []
    for t in range(block.shape[1]):
        single, _ = target.decode_step(block[:, t : t + 1], positions[:, t : t + 1], caches[1])  # [R, 1, V]
        delta = whole[:, t].float() - single[:, 0].float()
        spreads.append(delta.amax(-1) - delta.amin(-1))
    return torch.stack(spreads, dim=1)


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows padded on the right with their own last token [R, T], and their lengths [R]."""
    width = max(len(row) for row in rows)
    padded = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
    return torch.tensor(padded, device=device), torch.tensor([len(row) for row in rows], device=device)


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
