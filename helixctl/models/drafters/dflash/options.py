"""Options of DFlash, the sizes they come to for one target, and what those cost. Never imports torch."""

from __future__ import annotations

from typing import Literal

from helixctl.models.drafters._memory import step_bytes
from helixctl.models.drafters._options import BlockOptions, Loss, needs_last_hidden
from helixctl.models.drafters._sizes import Shape, make_shape, num_taps_of, parameter_count

__all__ = [
    "Loss",
    "Options",
    "Shape",
    "make_shape",
    "needs_last_hidden",
    "num_taps_of",
    "parameter_count",
    "step_bytes",
]


class Options(BlockOptions):
    """A block-diffusion drafter: non-causal decoder layers over one block, target features as keys and values."""

    algorithm: Literal["dflash"] = "dflash"
