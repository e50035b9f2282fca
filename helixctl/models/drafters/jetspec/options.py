"""Options of JetSpec, the sizes they come to for one target, and what those cost. Never imports torch."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from helixctl.models.drafters import _options
from helixctl.models.drafters._memory import step_bytes
from helixctl.models.drafters._options import BlockOptions, needs_last_hidden
from helixctl.models.drafters._sizes import make_shape, parameter_count

__all__ = ["Loss", "Options", "make_shape", "needs_last_hidden", "parameter_count", "step_bytes"]


class Loss(_options.Loss):
    """What a block is trained on: the divergence from the target, all slots alike, unless the recipe says otherwise."""

    cross_entropy: NonNegativeFloat = 0.0
    """Weight of the hard cross-entropy against the row's own tokens."""
    kl: NonNegativeFloat = 1.0
    """Weight of the divergence KL(target || drafter), scaled by the square of `kl_temperature`."""
    decay_gamma: PositiveFloat | None = None
    """Slot k weighs exp(-(k-1)/gamma); null weighs all slots alike."""


class Options(BlockOptions):
    """A causal parallel drafter: a slot sees the context, itself and the slots before it."""

    algorithm: Literal["jetspec"] = "jetspec"
    loss: _options.Loss = Loss()
    """What a block is trained on."""
