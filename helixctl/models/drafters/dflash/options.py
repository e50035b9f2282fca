"""Options of DFlash, the sizes they come to for one target, and what those cost. Never imports torch."""

from __future__ import annotations

from typing import Literal

from helixctl.models.drafters._options import BlockOptions, Loss, needs_last_hidden
from helixctl.models.drafters._sizes import Shape, activation_bytes, make_shape, num_taps_of, parameter_count

__all__ = [
    "Loss",
    "Options",
    "Shape",
    "activation_bytes",
    "make_shape",
    "needs_last_hidden",
    "num_taps_of",
    "parameter_count",
]


class Options(BlockOptions):
    """A block-diffusion drafter: non-causal decoder layers over one block, target features as keys and values."""

    algorithm: Literal["dflash"] = "dflash"
