"""Parts of a drafter by its tensors' published names: ``fc``, ``layers.0``, ``layers.*.mlp``. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from helixctl.errors import Problem
from helixctl.models.facts import TargetFacts
from helixctl.plugins import DRAFTERS, load_plugin
from helixctl.recipe.schema import DrafterOptions


def belongs(name: str, parts: Iterable[str]) -> bool:
    """Whether tensor ``name`` is in one of ``parts``: names or beginnings of names, with ``*`` for any piece."""
    pieces = name.split(".")
    return any(_begins(pieces, part.split(".")) for part in parts)


def count_frozen(options: DrafterOptions, target: TargetFacts, taps: Sequence[int]) -> int:
    """Parameters in the parts that ``options.freeze`` names."""
    shapes = _tensor_shapes(options, target, taps)
    return sum(math.prod(shape) for name, shape in shapes.items() if belongs(name, options.freeze))


def freeze_problems(options: DrafterOptions, target: TargetFacts, taps: Sequence[int]) -> Iterator[Problem]:
    """Parts in ``options.freeze`` that the drafter does not have, and a drafter that has no others."""
    names = [*_tensor_shapes(options, target, taps)] if options.freeze else []
    largest = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
    for part in options.freeze:
        if not any(belongs(name, [part]) for name in names):
            fix = f"use {largest}, or parts of them like layers.0.mlp"
            yield Problem("drafter.freeze", f"the drafter has no part {part!r}", fix=fix)
    if names and all(belongs(name, options.freeze) for name in names):
        yield Problem("drafter.freeze", "nothing is left to train", fix="freeze less")


def _tensor_shapes(options: DrafterOptions, target: TargetFacts, taps: Sequence[int]) -> dict[str, tuple[int, ...]]:
    published = load_plugin(DRAFTERS, options.algorithm, "published")
    shapes: dict[str, tuple[int, ...]] = published.tensor_shapes(published.describe(options, target, taps, None))
    return shapes


def _begins(pieces: list[str], part: list[str]) -> bool:
    return len(part) <= len(pieces) and all(map(fnmatchcase, pieces, part))
