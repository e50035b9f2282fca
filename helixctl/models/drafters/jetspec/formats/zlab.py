"""z-lab's format for DFlash, with ``is_causal`` and ``dflash_config.causal`` set. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helixctl.models.drafters.dflash.formats import zlab
from helixctl.models.drafters.dflash.formats.zlab import flatten, write
from helixctl.models.drafters.dflash.published import Published

__all__ = ["ENGINES", "flatten", "matches", "read", "write"]

ENGINES = ("vLLM",)
"""Serving engines that load it."""


def read(config: Mapping[str, Any]) -> Published:
    """What the configuration says.

    Raises:
        CheckpointError: keys are missing, or it describes a drafter that helixctl cannot compute; names all of them.
    """
    return zlab.read(config, causal=True)


def matches(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this format, and of causal blocks."""
    return zlab.SECTION in config and "speculators_model_type" not in config and zlab.is_causal(config)
