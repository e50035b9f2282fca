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


Decode = Callable[[Prompts, DecodeOptions, OnProgress | None], Sequence[Decoded]]
"""Any way to answer prompts."""


def time_decode(
    device: torch.device,
    decode: Decode,
    prompts: Prompts,
    options: DecodeOptions,
    *,
    on_progress: OnProgress | None = None,
) -> TimedDecode:
    """Time one call of `decode`, whatever it runs on `device`.

    A short decode goes first, outside the measurement; on a GPU the whole of it does, since what is captured there is
    captured for a number of rows and a length.
    """
    if device.type == "cuda":
        decode(prompts, options, None)
    else:
        decode(prompts[: options.batch_size], _warm_up(options), None)
    _wait(device)
    started_at = time.perf_counter()
    decoded = decode(prompts, options, on_progress)
    _wait(device)
    return TimedDecode(tuple(decoded), time.perf_counter() - started_at)


def time_plain(
    target: DecodeTarget, prompts: Prompts, options: DecodeOptions, *, on_progress: OnProgress | None = None
) -> TimedDecode:
    """Time `decode_plain`."""

    def decode(prompts: Prompts, options: DecodeOptions, on_progress: OnProgress | None) -> list[Decoded]:
        return decode_plain(target, prompts, options, on_progress=on_progress)

    return time_decode(target.device, decode, prompts, options, on_progress=on_progress)


def time_speculative(
    target: DecodeTarget,
    policy: DraftPolicy,
    prompts: Prompts,
    options: DecodeOptions,
    *,
    on_progress: OnProgress | None = None,
) -> TimedDecode:
    """Time `decode_speculative`."""

    def decode(prompts: Prompts, options: DecodeOptions, on_progress: OnProgress | None) -> list[Decoded]:
        return decode_speculative(target, policy, prompts, options, on_progress=on_progress)

    return time_decode(target.device, decode, prompts, options, on_progress=on_progress)


def _warm_up(options: DecodeOptions) -> DecodeOptions:
    return replace(options, max_new_tokens=min(options.max_new_tokens, WARM_UP_TOKENS))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a clock reading is only true when the device is done
