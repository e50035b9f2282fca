"""The version, in one place: the build reads it from here, and so do `--version` and checkpoints."""

from __future__ import annotations

__version__ = "0.1.0"
