"""``helixctl export`` and ``helixctl prepare --regenerate``: load what they need, then call the part that does it."""

from __future__ import annotations
