"""What the rest of helixctl calls: DFlash's own functions, built with causal blocks.

Drafts are chains. A tree of candidates, which causal blocks make possible, is not drafted.
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
