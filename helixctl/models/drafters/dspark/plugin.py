"""What the rest of helixctl calls: DFlash's own functions, built with shifted labels and two heads more."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from helixctl.models.drafters.dflash import plugin
from helixctl.models.drafters.dflash.model import DFlashDraftModel, Variant
from helixctl.models.drafters.dflash.plugin import export_state, import_state, initialise
from helixctl.models.drafters.dspark.heads import ConfidenceHead, MarkovHead
from helixctl.models.drafters.dspark.objective import train_terms, validation_sums
from helixctl.models.drafters.dspark.options import Options
from helixctl.models.drafters.dspark.policy import DSparkPolicy
from helixctl.models.facts import TargetFacts
from helixctl.models.shared import SharedWeights

__all__ = ["build", "export_state", "import_state", "initialise", "policy"]


def build(options: Options, facts: TargetFacts, taps: Sequence[int], seed: int) -> DFlashDraftModel:
    """A new drafter on the CPU, float32; a pure function of its arguments.

    Raises:
        ModelError: sizes that do not fit together.
    """
    return plugin.build(options, facts, taps, seed, make_variant(options.markov_rank))


def make_variant(rank: int) -> Variant:
    """What sets it apart from DFlash."""
    return Variant(
        shift=1,
        train=train_terms,
        evaluate=validation_sums,
        parts={
            "markov_head": lambda shape: MarkovHead(shape.vocab_size, rank),
            "confidence_head": lambda shape: ConfidenceHead(shape.hidden_size, rank),
        },
    )


def policy(model: nn.Module, shared: SharedWeights) -> DSparkPolicy:
    """How decoding asks this drafter for tokens; a snapshot of its weights."""
    assert isinstance(model, DFlashDraftModel)
    return DSparkPolicy(model, shared)
