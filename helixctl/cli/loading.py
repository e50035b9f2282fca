"""What several commands begin with: the recipe that they were given, its plan, and paths that must exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from helixctl.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from helixctl.lm_plan import AnyPlan
    from helixctl.plan import Plan
    from helixctl.recipe.load import AnyRecipe

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one option, e.g. train.steps=100; may be repeated."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="A checkpoint of the run, the best one if left out; or a published drafter."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def load(path: Path, overrides: Sequence[str] | None) -> AnyRecipe:
    """The recipe that a command was given, of either kind."""
    from helixctl.recipe.load import load_any_recipe

    return load_any_recipe(path, overrides or ())


def load_plan(path: Path, overrides: Sequence[str] | None, *, decodes: bool = False) -> Plan:
    """The plan of a drafter's recipe, for commands that only drafters have.

    Raises:
        RecipeError: see ``load_any_plan``; or the recipe is of another kind.
    """
    from helixctl.plan import Plan
    from helixctl.recipe.load import load_recipe

    load_recipe(path, overrides or ())
    plan = load_any_plan(path, overrides, decodes=decodes)
    assert isinstance(plan, Plan), "load_recipe has refused it"
    return plan


def load_any_plan(path: Path, overrides: Sequence[str] | None, *, decodes: bool = False) -> AnyPlan:
    """The plan for a recipe on this machine; mistakes found by the plan get their place in the file.

    A command that ``decodes`` needs the target itself: stored features are of no use to it, and may be gone by now.
    """
    from helixctl.lm_plan import make_any_plan
    from helixctl.machine import read_machine
    from helixctl.recipe.load import locate
    from helixctl.recipe.schema import Recipe

    recipe = load(path, overrides)
    if decodes and isinstance(recipe, Recipe):
        recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"features": None})})
    try:
        return make_any_plan(recipe, read_machine())
    except RecipeError as error:
        raise locate(error, path, overrides or ()) from None


def refuse_what_cannot_fit(plan: AnyPlan, path: Path, overrides: Sequence[str] | None) -> None:
    """Refuse a plan that no device of this machine can hold.

    Raises:
        RecipeError: names each device, the largest part, and the option that shrinks it.
    """
    from helixctl.recipe.load import locate

    if plan.lacks:
        raise locate(RecipeError(plan.lacks), path, overrides or ())


def check_exists(path: Path | None, option: str) -> None:
    """Refuse a path that is not there.

    Raises:
        UsageError: names the option.
    """
    if path is not None and not path.exists():
        raise UsageError(f"{option}: there is no {path}", fix="check the path")
