"""``helixctl.warmup.child`` with random weights, for ``warmup_shape.py``."""

from __future__ import annotations

from helixctl.warmup import child
from scripts.shapes import random_weights


def main() -> None:
    """What the child does, on a target without weights on disk."""
    with random_weights():
        child.main()


if __name__ == "__main__":
    main()
