"""The second implementation of DFlash's drafter, which reads causality from the configuration."""

from __future__ import annotations

from helixctl.models.drafters.dflash.readback import largest_difference, published_difference

__all__ = ["largest_difference", "published_difference"]
