"""Published drafters, of any format, as starting points of training and in place of a run's own checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from helixctl.checkpoint.published import PublishedDrafter, open_published
from helixctl.errors import CheckpointError
from helixctl.plan import Plan
from helixctl.plugins import DRAFTERS, load_plugin

_TARGETS = ("hidden_size", "vocab_size")
_FREE_AT_START = ("block_size", "mask_token_id")
"""What training may change; a drafter that is only measured keeps it."""


def open_for(plan: Plan, folder: Path, *, starts: bool) -> PublishedDrafter:
    """The published drafter in ``folder``, after a look whether it is the plan's; its weights are not read yet.

    Args:
        plan: Names the target and the drafter's sizes.
        folder: Any known format.
        starts: Training starts from it: block size and mask token may then differ.

    Raises:
        CheckpointError: not a drafter, one that helixctl cannot compute, or another than the recipe's; the fix says
            what to set.
    """
    found = open_published(folder)
    drafter = plan.recipe.drafter
    if found.algorithm != drafter.algorithm:
        raise CheckpointError(
            f"{folder} is a drafter of {found.algorithm}, the recipe's of {drafter.algorithm}",
            fix=f"set drafter.algorithm: {found.algorithm}",
        )
    part = load_plugin(DRAFTERS, drafter.algorithm, "published")
    theirs = asdict(found.describe())
    ours = asdict(part.describe(drafter, plan.target, plan.target_layer_ids, None))
    checked = (*part.SIZES, *(() if starts else _FREE_AT_START))
    wrong = [name for name in (*_TARGETS, *checked) if not _same(theirs[name], ours[name])]
    if wrong:
        listed = "; ".join(f"{name} is {theirs[name]}, the recipe's {ours[name]}" for name in wrong)
        raise CheckpointError(f"{folder} is another drafter: {listed}", fix=_fix(found, wrong))
    return found


def load_into(model: nn.Module, found: PublishedDrafter) -> None:
    """Put the published weights into ``model``, whose types stay as they are.

    Raises:
        CheckpointError: tensors are missing, unknown, or of other shapes.
    """
    plugin: Any = load_plugin(DRAFTERS, found.algorithm, "plugin")
    plugin.import_state(model, found.load_tensors())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    return bool(one == other)


def _fix(found: PublishedDrafter, wrong: list[str]) -> str:
    if set(wrong) & set(_TARGETS):
        return "name the target that it was trained for"
    part = load_plugin(DRAFTERS, found.algorithm, "published")
    options = part.options_of(found.describe()).model_dump(mode="json")
    names = [part.OPTION_OF.get(name, name) for name in wrong]
    return " ".join(f"--set drafter.{name}={json.dumps(options[name], separators=(',', ':'))}" for name in names)
