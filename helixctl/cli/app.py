"""The commands: parse, call, render. Whatever is heavy is imported inside a command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from helixctl.cli import render
from helixctl.cli.doctor import doctor
from helixctl.cli.exporting import convert, export
from helixctl.cli.loading import (
    Overrides,
    RecipePath,
    load_any_plan,
    load_plan,
    refuse_what_cannot_fit,
)
from helixctl.cli.logs import set_up_logs
from helixctl.cli.looking import report, runs
from helixctl.cli.pages import docs
from helixctl.cli.planning import plan
from helixctl.cli.preparing import prepare
from helixctl.cli.process import heavy_imports, run_process
from helixctl.cli.profile import profile
from helixctl.cli.validating import validate
from helixctl.cli.warming import warmup_compile
from helixctl.doctor.guard import install_guard
from helixctl.errors import UsageError
from helixctl.version import __version__

app = typer.Typer(
    name="helixctl",
    help="Trains drafters for speculative decoding: one recipe, one command.",
    epilog="First steps: helixctl docs tutorial. What a message means: its line `more:`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipe_app = typer.Typer(help="About recipes themselves.", no_args_is_help=True)

_RESUME = "Go on from the last checkpoint in run.dir; begin where there is none."
_FORK_GUARDED = ("train", "validate")
"""Commands that refuse a fork after CUDA's start unless told otherwise; nothing of ours forks."""


def main() -> None:
    """Run the command line and end the process with its exit code."""
    run_process(lambda: app(prog_name="helixctl"))


def _show_version(wanted: bool) -> None:
    if wanted:
        render.render_text(f"helixctl {__version__}")
        raise typer.Exit


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the parts are doing.")] = False,
) -> None:
    """Options before the command."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder does not exist any more", fix="cd to another one") from None
    set_up_logs(verbose=verbose)
    install_guard(default=context.invoked_subcommand in _FORK_GUARDED)


def train(
    recipe: RecipePath,
    set_: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; writes nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Compile nothing, for debugging: compile.mode: off.")] = False,
) -> None:
    """Train a drafter or a causal LM."""
    overrides = [*(set_ or []), *(["compile.mode=off"] if eager else [])]
    made = load_any_plan(recipe, overrides)
    if dry_run:
        render.render_plan(made)
        return
    refuse_what_cannot_fit(made, recipe, overrides)
    first = made.world.rank == 0
    render.render_warnings(made.warnings if first else ())
    with heavy_imports():
        from helixctl.training.run import run_training
    result = run_training(made, resume=resume)
    if first:
        render.render_train_result(result)


def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of the target, or its hub name.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Training documents: a file or a folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Recipe to write.")] = Path(
        "recipe.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented recipe for a target and its documents, after a look at both."""
    from helixctl.cli.init import write_recipe

    findings = write_recipe(model, data, output, force=force)
    load_plan(output, None)
    render.render_init(output, findings)


def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from helixctl.recipe.load import recipe_schema

    render.render_json(recipe_schema())


_COMMANDS = {
    "Step by step": (init, plan, prepare, train, validate, export),
    "Looking": (runs, report, profile, doctor, docs),
    "More": (convert, warmup_compile),
}
"""In the order of `helixctl --help`."""

for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command(_command.__name__.replace("_", "-"), rich_help_panel=_panel)(_command)
app.add_typer(recipe_app, name="recipe", rich_help_panel="More")
recipe_app.command()(schema)
