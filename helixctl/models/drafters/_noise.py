"""Noise on features: a pure function of (seed, micro-batch, tap, row, token, channel), computed where the features are.

There is no generator and so no state: every number is a hash of its place. The same micro-batch gets the same noise on
every device and in every lane, before and after a resume. The micro-batch's number is a tensor, so a new one neither
recompiles nor needs the host.

Legend: R rows, S tokens per row, H width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from helixctl.models.drafters._options import FeatureNoise
from helixctl.models.private import compiled_here

Kind = Literal["uniform", "gaussian"]

_ROW_STRIDE = 0x9E3779B1 - 2**32
_CHANNEL_STRIDE = 0x85EBCA6B - 2**32
_TAP_STRIDE = 0x27D4EB2F
_BITS = 23
"""Of a number drawn: with half a step added it is exact in float32, and never -1 or 1."""


def add_noise(
    features: Sequence[Tensor], options: FeatureNoise, seed: int, number: Tensor | None, first_row: int = 0
) -> list[Tensor]:
    """Taps [R, S, H] with noise of the asked kind, in their own type; as they are for ``none``.

    Args:
        features: K taps.
        options: Kind and size.
        seed: The run's.
        number: [] int64 on the features' device, the micro-batch's; None counts as 0.
        first_row: Row of the micro-batch that the taps begin with.
    """
    if options.kind == "none" or options.scale == 0.0:
        return list(features)
    device = features[0].device
    number = torch.zeros((), dtype=torch.int64, device=device) if number is None else number
    key = _scramble(number.to(torch.int32) * _ROW_STRIDE + _signed(seed * 0xC2B2AE35))
    key = key + _signed(first_row * features[0].shape[1] * _ROW_STRIDE)
    noisy = _noisy_for(device.type)
    return [noisy(tap, key + _signed(i * _TAP_STRIDE), options.kind, options.scale) for i, tap in enumerate(features)]


def _noisy(x: Tensor, key: Tensor, kind: Kind, scale: float) -> Tensor:
    """``x`` [R, S, H] plus noise whose standard deviation is ``scale`` times each token's mean absolute value."""
    rows, tokens, width = x.shape
    place = torch.arange(rows * tokens, dtype=torch.int32, device=x.device).view(rows, tokens, 1)
    channel = torch.arange(width, dtype=torch.int32, device=x.device)
    bits = _scramble(_scramble(place * _ROW_STRIDE + key) + channel * _CHANNEL_STRIDE)  # [R, S, H]
    steps = (bits & (2**_BITS - 1)).float() + 0.5
    flat = steps / 2 ** (_BITS - 1) - 1.0  # uniform in (-1, 1)
    drawn = flat * math.sqrt(3.0) if kind == "uniform" else torch.erfinv(flat) * math.sqrt(2.0)
    wide = x.float()
    size = wide.abs().mean(dim=-1, keepdim=True) * scale
    return (wide + drawn * size).to(x.dtype)


def _scramble(x: Tensor) -> Tensor:
    """A one-to-one hash of 32 bits; int32 products wrap around."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(value: int) -> int:
    """The int32 that has the low 32 bits of ``value``."""
    return (value + 2**31) % 2**32 - 2**31


def _noisy_for(device: str) -> Callable[[Tensor, Tensor, Kind, float], Tensor]:
    if torch.compiler.is_dynamo_compiling() or device == "cpu":
        return _noisy
    compiled: Callable[[Tensor, Tensor, Kind, float], Tensor] = compiled_here(_noisy)
    return compiled
