"""`helixctl export` and `helixctl convert`: drafters into the formats of serving engines, and a look at any drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from helixctl.cli import render
from helixctl.cli.loading import Checkpoint, Overrides, check_exists, load_any_plan
from helixctl.cli.options import grouped
from helixctl.cli.process import heavy_imports
from helixctl.errors import UsageError

if TYPE_CHECKING:
    from helixctl.checkpoint.export import ExportResult
    from helixctl.models.facts import TargetFacts

FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="One of the algorithm's formats, such as zlab (vLLM, SGLang, z-lab's own code) or speculators (vLLM).",
    ),
]
TargetOption = Annotated[
    str | None, typer.Option("--target", metavar="MODEL", help="Folder or hub name of the drafter's target.")
]


@dataclass(frozen=True)
class WhatToExport:
    """Which drafter, and what is said about it."""

    set_: Overrides = None
    checkpoint: Checkpoint = None
    format: FormatOption = None
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write; a folder in run.dir if left out.")
    ] = None
    base_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Hub name of the target, where the recipe names a folder.")
    ] = None
    license: Annotated[str | None, typer.Option(metavar="ID", help="Licence of the drafter, for its card.")] = None


@dataclass(frozen=True)
class Publishing:
    """What happens beside writing it."""

    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also upload it to a hub; private where it is new.")
    ] = None
    public: Annotated[bool, typer.Option("--public", help="With --push: a new repository is for everybody.")] = False
    check: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write nothing: judge any published drafter, ours or not.")
    ] = None
    target: TargetOption = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False


@grouped
def export(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="Recipe file (YAML); not needed with --check.")
    ] = None,
    *,
    what: WhatToExport,
    publishing: Publishing,
) -> None:
    """Write a checkpoint in a published format that serving engines load, or judge a published drafter.

    With --check fails when the drafter is broken, or when no engine reads it.
    """
    if publishing.check is not None:
        _check(publishing.check, publishing.target, as_json=publishing.as_json)
        return
    if recipe is None:
        raise UsageError("a recipe is needed", fix="helixctl export RECIPE, or helixctl export --check FOLDER")
    check_exists(what.checkpoint, "--checkpoint")
    result = _write(recipe, what, publishing.push)
    if publishing.as_json:
        render.render_json(result)
    else:
        render.render_export(result)
    if publishing.push is not None:
        from helixctl.checkpoint.push import push

        address = push(result.dir, publishing.push, private=not publishing.public)
        if not publishing.as_json:
            render.render_text(f"uploaded to {address}")


def _write(recipe: Path, what: WhatToExport, push: str | None) -> ExportResult:
    """A drafter in the format that was asked for, or a causal LM as an ordinary folder."""
    from helixctl.plan import Plan

    plan = load_any_plan(recipe, what.set_, decodes=True)
    if not isinstance(plan, Plan):
        if what.format is not None or what.base_model is not None:
            raise UsageError("--format and --base-model are for drafters", fix="leave them out")
        with heavy_imports():
            from helixctl.training.lm_commands import run_lm_export
        return run_lm_export(plan, checkpoint=what.checkpoint, output=what.output, license_=what.license)
    _check_push(push, what.base_model or plan.recipe.target.model)
    with heavy_imports():
        from helixctl.training.commands import ExportRequest, run_export
    request = ExportRequest(what.checkpoint, what.output, what.format, what.base_model, what.license)
    return run_export(plan, request)


def convert(
    source: Annotated[Path, typer.Argument(metavar="DRAFTER", help="Folder of a published drafter, of any format.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder to write.")],
    format_: FormatOption = None,
    target: TargetOption = None,
) -> None:
    """Write a published drafter in another format; its tensors stay as they are."""
    check_exists(source, "DRAFTER")
    facts = None if target is None else _facts(target)
    with heavy_imports():
        from helixctl.checkpoint.convert import convert as convert_drafter
    render.render_export(convert_drafter(source, output, format_, target=target, facts=facts))


def _check(folder: Path, target: str | None, *, as_json: bool) -> None:
    from helixctl.checkpoint.check import check_published

    check_exists(folder, "--check")
    result = check_published(folder, None if target is None else _facts(target))
    if as_json:
        render.render_json(result)
    else:
        render.render_check(result)
    if not result.sound:
        raise typer.Exit(1)


def _facts(target: str) -> TargetFacts:
    from helixctl.models.facts import read_target_facts
    from helixctl.recipe.schema import TargetOptions

    return read_target_facts(TargetOptions(model=target))


def _check_push(repository: str | None, base_model: str) -> None:
    """What is published names its target by a name that others know."""
    from helixctl.checkpoint.card import is_local

    if repository is not None and is_local(base_model):
        raise UsageError(
            f"--push: the target is a folder of this machine, {base_model}", fix="add --base-model OWNER/NAME"
        )
