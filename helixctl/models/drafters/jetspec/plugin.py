"""What the rest of helixctl calls: DFlash's own functions, built with causal blocks.

Trees of drafts are DFlash's too: the likeliest candidates by the slots of one parallel forward. The paper speaks of
candidates that hang on their branch; its published code also takes the slots of one forward over mask tokens, each the
same behind all candidates of the slot before (github.com/hao-ai-lab/JetSpec, its baseline ``accum_logp``), and lists
trees that forward their candidates again as planned. What causal blocks add is that a slot's distribution does not hang
on how far the block goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from helixctl.models.drafters.dflash import plugin
from helixctl.models.drafters.dflash.model import DFlashDraftModel, Variant
from helixctl.models.drafters.dflash.plugin import export_state, import_state, initialise, policy
from helixctl.models.drafters.jetspec.options import Options
from helixctl.models.facts import TargetFacts

__all__ = ["build", "export_state", "import_state", "initialise", "policy"]

VARIANT = Variant(causal=True)


def build(options: Options, facts: TargetFacts, taps: Sequence[int], seed: int) -> DFlashDraftModel:
    """A new drafter on the CPU, float32; a pure function of its arguments.

    Raises:
        ModelError: sizes that do not fit together.
    """
    return plugin.build(options, facts, taps, seed, VARIANT)
