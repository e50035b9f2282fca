"""Which layers of a target are captured: chosen evenly, or checked where a recipe names them. Never imports torch."""

from __future__ import annotations

from helixctl.errors import Problem
from helixctl.models.facts import TargetFacts
from helixctl.recipe.schema import DrafterOptions


def default_target_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """An even spread from layer 1 to layer N-3, as published drafters use; (36, 5) -> 1, 9, 17, 25, 33.

    Targets too small for that spread are tapped evenly from the first to the last layer.

    Raises:
        ValueError: more taps than layers.
    """
    if not 1 <= num_taps <= num_layers:
        raise ValueError(f"{num_taps} taps of {num_layers} layers")
    if num_taps == 1:
        return (num_layers // 2,)
    # Python rounds halves to even, and so does the published formula.
    ids = tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    if num_layers > 4 and len(set(ids)) == num_taps:
        return ids
    return tuple(round(i * (num_layers - 1) / (num_taps - 1)) for i in range(num_taps))


def choose_taps(drafter: DrafterOptions, target: TargetFacts) -> tuple[tuple[int, ...], list[Problem]]:
    """The taps, and what is wrong with them."""
    ids, last = drafter.target_layer_ids, target.num_layers - 1
    if ids is None:
        num_taps = drafter.num_taps or drafter.num_layers
        if num_taps <= target.num_layers:
            return default_target_layer_ids(target.num_layers, num_taps), []
        message = f"would be {num_taps}, but the target has only {target.num_layers} layers"
        return (), [Problem("drafter.num_taps", message, fix=f"set drafter.num_taps to {target.num_layers} or less")]
    key, proper = "drafter.target_layer_ids", sorted({i for i in ids if i <= last})
    even = default_target_layer_ids(target.num_layers, min(max(len(ids), 1), target.num_layers))
    instead, fix = f"use {list(even)}, or leave it out", f"use {proper}"
    message = f"is {list(ids)}, but "
    if not ids:
        return ids, [Problem(key, "is empty", fix=instead)]
    if max(ids) > last:
        return ids, [Problem(key, f"{message}the target's layers are 0 to {last}", fix=instead)]
    if len(set(ids)) < len(ids):
        return ids, [Problem(key, f"{message}every layer is tapped once", fix=fix)]
    if list(ids) != proper:
        return ids, [Problem(key, f"{message}layers stand in ascending order", fix=fix)]
    return ids, []
