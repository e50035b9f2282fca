"""A published DSpark drafter in our words. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from helixctl.models.drafters.dflash import published
from helixctl.models.drafters.dflash.published import OPTION_OF, Published, own_tensor_name
from helixctl.models.drafters.dspark.options import Options
from helixctl.models.facts import TargetFacts

__all__ = ["DEFAULT_FORMAT", "OPTION_OF", "SIZES", "Published", "describe", "options_of", "own_tensor_name"]

DEFAULT_FORMAT = "deepspec"
"""What ``export`` writes unless told otherwise."""
SIZES = (*published.SIZES, "markov_rank")
"""What has to agree between a published drafter and a recipe."""


def describe(options: Options, facts: TargetFacts, taps: Sequence[int], target: str | None) -> Published:
    """The drafter that ``options`` make for a target.

    Raises:
        ModelError: sizes that do not fit together.
    """
    return replace(published.describe(options, facts, taps, target), markov_rank=options.markov_rank)


def options_of(drafter: Published) -> Options:
    """The recipe's ``drafter`` section that builds it, every size written out."""
    return Options.model_validate(published.option_values(drafter) | {"markov_rank": drafter.markov_rank})


def tensor_shapes(sizes: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a drafter with these sizes (a ``Published``)."""
    rank, width, rows = sizes.markov_rank, sizes.hidden_size, sizes.vocab_size
    return published.tensor_shapes(sizes) | {
        "markov_head.markov_w1.weight": (rows, rank),
        "markov_head.markov_w2.weight": (rows, rank),
        "confidence_head.proj.weight": (1, width + rank),
        "confidence_head.proj.bias": (1,),
    }
