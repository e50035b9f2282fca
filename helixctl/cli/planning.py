"""`helixctl plan`: what a recipe will do and cost, counted; with `--measure` also timed on the devices of the plan."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from helixctl.cli import render
from helixctl.cli.loading import (
    AsJson,
    Overrides,
    RecipePath,
    check_exists,
    load_any_plan,
    load_plan,
    refuse_what_cannot_fit,
)
from helixctl.cli.process import heavy_imports

if TYPE_CHECKING:
    from helixctl.training.measure import Measured
    from helixctl.training.placement import Placement


def plan(
    recipe: RecipePath,
    set_: Overrides = None,
    target_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The target's config.json, where the target is not on this machine."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time target and drafter alone on their devices; compare placements.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a recipe will do and cost; writes nothing. Fails where no device can hold it."""
    check_exists(target_config, "--target-config")
    overrides = [*(set_ or [])]
    if target_config is not None:
        overrides.append(f"target.config={json.dumps(str(target_config))}")
    made = load_any_plan(recipe, overrides)
    told = made.to_json()
    if not as_json:
        render.render_plan(made)
    refuse_what_cannot_fit(made, recipe, overrides)
    if measure:
        measured = _measure(recipe, overrides)
        told["measured"] = dataclasses.asdict(measured)
        if not as_json:
            render.render_section("measured", measured_rows(measured), placement_table(measured))
    if as_json:
        render.render_json(told)


def _measure(recipe: Path, overrides: list[str]) -> Measured:
    """Of drafters only: there is nothing to place beside the training loops of a causal LM."""
    made = load_plan(recipe, overrides)
    with heavy_imports():
        from helixctl.machine import read_machine
        from helixctl.training.measure import measure as measure_plan
    return measure_plan(made, read_machine())


def measured_rows(measured: Measured) -> dict[str, str]:
    """Both stages alone, what the plan's devices give, and what would give more."""
    pace, current = measured.pace, measured.current
    rows = {
        "micro-batches": f"{measured.batches}: {pace.tokens:,.0f} tokens",
        "target alone": _alone(pace.target_s, pace.tokens),
        "drafter alone": f"{_alone(pace.drafter_s, pace.tokens)}, its share of a step included",
        "this plan": f"about {current.tokens_per_s:,.0f} tokens/s; limit: {current.limit}",
    }
    best = measured.recommended
    if best is None:
        return rows | {"recommended": "nothing: no placement fits into the devices' memory"}
    if (best.targets, best.drafters) == (current.targets, current.drafters):
        return rows | {"recommended": "the devices of this plan"}
    option = f"pipeline: {{targets: [{', '.join(best.targets)}], drafters: [{', '.join(best.drafters)}]}}"
    return rows | {"recommended": option, "with it": f"about {best.tokens_per_s:,.0f} tokens/s"}


def placement_table(measured: Measured) -> Table:
    """Ways to use the devices, fastest first."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("targets", "drafters", "tokens/s", "limit", "memory"):
        table.add_column(title, justify="right" if title == "tokens/s" else "left")
    for placement in measured.placements:
        fits = "fits" if placement.fits else "too little"
        table.add_row(*_devices(placement), f"{placement.tokens_per_s:,.0f}", placement.limit, fits)
    return table


def _alone(seconds: float, tokens: float) -> str:
    return f"{1000 * seconds:,.1f} ms, {tokens / seconds:,.0f} tokens/s" if seconds else "read from disk"


def _devices(placement: Placement) -> tuple[str, str]:
    return _short(placement.targets), _short(placement.drafters)


def _short(devices: tuple[str, ...]) -> str:
    """`cuda:0-3`, where there are several in a row."""
    names = list(Counter(devices))
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1].rpartition(':')[2]}"
