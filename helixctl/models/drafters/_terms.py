"""What one micro-batch adds to a step's loss and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """Additive over micro-batches, drafters and hosts; the step's loss is sum(numerator) / sum(denominator)."""

    numerator: Tensor  # [] float32, with gradient
    denominator: Tensor  # [] float32
    sums: dict[str, Tensor]
    """Additive metrics, float32 scalars on the drafter's device, without gradient."""
