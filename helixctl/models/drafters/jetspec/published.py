"""A published JetSpec drafter in our words: DFlash's, with causal blocks. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from helixctl.models.drafters.dflash import published
from helixctl.models.drafters.dflash.published import (
    DEFAULT_FORMAT,
    OPTION_OF,
    SIZES,
    Published,
    own_tensor_name,
    tensor_shapes,
)
from helixctl.models.drafters.jetspec.options import Options
from helixctl.models.facts import TargetFacts

__all__ = [
    "DEFAULT_FORMAT",
    "OPTION_OF",
    "SIZES",
    "Published",
    "describe",
    "options_of",
    "own_tensor_name",
    "tensor_shapes",
]


def describe(options: Options, facts: TargetFacts, taps: Sequence[int], target: str | None) -> Published:
    """The drafter that ``options`` make for a target.

    Raises:
        ModelError: sizes that do not fit together.
    """
    return replace(published.describe(options, facts, taps, target), causal=True)


def options_of(drafter: Published) -> Options:
    """The recipe's ``drafter`` section that builds it, every size written out."""
    return Options.model_validate(published.option_values(drafter))
