"""Seconds and tokens of decoding with and without a drafter, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from helixctl.decoding.decoded import Decoded, DecodeOptions
from helixctl.decoding.policy import DecodeTarget, DraftPolicy
from helixctl.decoding.speculative import OnProgress, Prompts, decode_plain, decode_speculative

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class TimedDecode:
    """Answers and how long they took; prefill included, loading and warm-up not."""

    decoded: tuple[Decoded, ...]
    elapsed_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens emitted."""
        return sum(len(answer.tokens) for answer in self.decoded)

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second, over all rows."""
        return self.num_tokens / self.elapsed_s


def time_plain(
    target: DecodeTarget, prompts: Prompts, options: DecodeOptions, *, on_progress: OnProgress | None = None
) -> TimedDecode:
    """Time `decode_plain`; a short decode of the same prompts goes first, outside the measurement."""
    decode_plain(target, prompts[: options.batch_size], _warm_up(options))
    return _timed(target, lambda: decode_plain(target, prompts, options, on_progress=on_progress))


def time_speculative(
    target: DecodeTarget,
    policy: DraftPolicy,
    prompts: Prompts,
    options: DecodeOptions,
    *,
    on_progress: OnProgress | None = None,
) -> TimedDecode:
    """Time `decode_speculative`; a short decode of the same prompts goes first, outside the measurement."""
    decode_speculative(target, policy, prompts[: options.batch_size], _warm_up(options))
    return _timed(target, lambda: decode_speculative(target, policy, prompts, options, on_progress=on_progress))


def _warm_up(options: DecodeOptions) -> DecodeOptions:
    return replace(options, max_new_tokens=min(options.max_new_tokens, WARM_UP_TOKENS))


def _timed(target: DecodeTarget, decode: Callable[[], Sequence[Decoded]]) -> TimedDecode:
    _wait(target.device)
    started_at = time.perf_counter()
    decoded = decode()
    _wait(target.device)
    return TimedDecode(tuple(decoded), time.perf_counter() - started_at)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a clock reading is only true when the device is done
