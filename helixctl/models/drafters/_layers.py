"""Small layers that drafters share: a float32 norm, float32 rotary positions, a gated MLP.

Legend: H width, I MLP width, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each [..., 1, D] float32, broadcast over heads."""


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Type of matrix products here: autocast's where the caller switched it on, else the weights' own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 whatever comes in."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normed ``x`` in float32; callers cast."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> Rotary:
    """Cosines and sines for integer ``positions`` [...].

    Made anew in float32 for every forward and kept in no buffer, so a cast of the module to bfloat16 cannot round
    the frequencies (an error that grows with the position and that serving does not make).
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequencies = torch.pow(theta, -exponents)  # [D / 2]
    angles = positions.float()[..., None, None] * frequencies  # [..., 1, D / 2]
    angles = torch.cat((angles, angles), dim=-1)  # [..., 1, D]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate-half (neox) rotary positions on float32 heads ``x`` [..., heads, D]."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
