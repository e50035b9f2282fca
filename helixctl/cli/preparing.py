"""`helixctl prepare`: documents into a store, and on request the target's answers before it, its features after it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from helixctl.cli import render
from helixctl.cli.loading import Overrides, RecipePath, load, load_plan
from helixctl.cli.process import heavy_imports

if TYPE_CHECKING:
    from helixctl.plan import Plan
    from helixctl.recipe.load import AnyRecipe

_WORTH_ASKING = 0.5
"""Share of the free disk beyond which a person is asked."""


def prepare(
    recipe: RecipePath,
    set_: Overrides = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="First let the target answer the prompts, then prepare its answers.")
    ] = False,
    features: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also store the target's features there, for training without the target."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before much of the disk is filled.")] = False,
    show: Annotated[int, typer.Option(min=0, metavar="N", help="Print N prepared documents with their mask.")] = 0,
) -> None:
    """Turn documents into a store of tokens and loss masks."""
    if features is not None:
        from helixctl.data.stored_features import find_features

        find_features(features)  # refuses other things before the work, not behind it
    if regenerate:
        _regenerate(load_plan(recipe, set_, decodes=True))
    for loaded in _by_store(load(recipe, set_)):
        with heavy_imports():
            from helixctl.data.prepare import prepare as prepare_store
            from helixctl.data.prepare import samples
        with render.progress("documents") as show_progress:
            result = prepare_store(loaded, on_progress=lambda done, total, _: show_progress(done, total))
        render.render_prepare(result)
        for i, sample in enumerate(samples(loaded, show) if show else ()):
            render.render_sample(sample.tokens, sample.supervised, f"document {i}")
    if features is not None:
        _store_features(recipe, set_, features, ask=not yes)


def _by_store(recipe: AnyRecipe) -> list[AnyRecipe]:
    """The recipe once for every store it needs: stages of a causal LM may have documents of their own."""
    from helixctl.recipe.causal_lm import CausalLMRecipe, data_sections

    if not isinstance(recipe, CausalLMRecipe):
        return [recipe]
    return [recipe.model_copy(update={"data": data}) for data in data_sections(recipe)]


def _regenerate(plan: Plan) -> None:
    """Let the target answer the recipe's prompts."""
    with heavy_imports():
        from helixctl.training.commands import run_regeneration
    with render.progress("answers") as show_progress:
        result = run_regeneration(plan, show_progress)
    render.render_regeneration(result)


def _store_features(recipe: Path, overrides: Sequence[str] | None, folder: Path, *, ask: bool) -> None:
    """Say what it takes, then let the target run over every document."""
    with heavy_imports():
        from helixctl.training.capture import Capture, refuse_lack_of_room, run_capture
    capture = Capture(load_plan(recipe, overrides, decodes=True), folder.absolute())
    forecast = capture.forecast()
    render.render_record("features to store", forecast)
    refuse_lack_of_room(forecast)
    fills_much = forecast.missing_bytes > _WORTH_ASKING * forecast.free_bytes
    if ask and fills_much and sys.stdin.isatty() and not typer.confirm("Fill more than half of what is free there?"):
        raise typer.Exit(1)
    with render.progress("tokens") as show_progress:
        result = run_capture(capture, show_progress)
    render.render_record("features", result)
