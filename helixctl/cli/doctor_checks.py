"""`doctor` beside the code: a machine (`--env`, `--report`), a recipe (`--recipe`, `--live`), the fork guard (`--run`).

Exit codes: 0 nothing failed, 1 a check failed, 2 wrong use. Warnings and skipped checks count only where asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from helixctl.cli import render
from helixctl.cli.process import heavy_imports
from helixctl.errors import HelixError, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from helixctl.doctor.environment_host import Host
    from helixctl.doctor.probe import Outcome

_MACHINE, _RECIPE = "Machine", "Recipe"
_FORMATS = ("text", "json")
_SHARED = ("fail_on", "format", "cache_dir")
"""Options for code that mean something here too, or come from a variable."""
_FAIL_ON = {"error": ("fail",), "warning": ("fail", "warn"), "info": ("fail", "warn"), "never": ()}
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


@dataclass(frozen=True)
class CheckOptions:
    """What else the doctor looks at; without any of these it looks at code."""

    env: Annotated[bool, typer.Option("--env", help="Check this machine.", rich_help_panel=_MACHINE)] = False
    report: Annotated[
        bool, typer.Option("--report", help="Print a block for a bug report.", rich_help_panel=_MACHINE)
    ] = False
    run: Annotated[
        bool,
        typer.Option("--run", help="Run the command behind -- and refuse forks after CUDA.", rich_help_panel=_MACHINE),
    ] = False
    recipe: Annotated[Path | None, typer.Option(metavar="RECIPE", help="Check a recipe.", rich_help_panel=_RECIPE)] = (
        None
    )
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace one option of it.", rich_help_panel=_RECIPE),
    ] = None
    live: Annotated[
        bool, typer.Option("--live", help="And run the proofs on its target and drafter.", rich_help_panel=_RECIPE)
    ] = False
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Fail if this check is skipped, e.g. ENV010; may be repeated."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False

    @property
    def any(self) -> bool:
        """Whether something else than code is wanted, or an option is given that has no meaning for code."""
        return self != replace(NO_CHECKS, as_json=self.as_json)


NO_CHECKS = CheckOptions()
"""None of them: the doctor looks at code."""


def run_checks(words: list[str], options: CheckOptions, *, fail_on: str, output_format: str) -> None:
    """Do what is asked for, print it, and end with 1 if a check failed.

    Args:
        words: The command's positional words: the program of `--run`, else none.
        options: What to check.
        fail_on: error, warning, info or never.
        output_format: text or json.

    Raises:
        UsageError: options that do not go together.
    """
    _refuse(words, options, fail_on, output_format)
    if options.run:
        run_guarded(words)
    as_json = options.as_json or output_format == "json"
    from helixctl.doctor.environment_host import Host
    from helixctl.doctor.probe import outcomes_to_json, require
    from helixctl.doctor.report import make_report

    host = Host()
    found = require(_outcomes(options, host), options.require or ())
    if options.report:
        outcomes = [*found]
        render.render_text(make_report(host, outcomes))
    elif as_json:
        outcomes = [*found]
        render.render_json(outcomes_to_json(outcomes))
    else:
        outcomes = render.render_outcomes(found)
    if any(outcome.state in _FAIL_ON[fail_on] for outcome in outcomes):
        raise typer.Exit(1)


def refuse_code_options(code: DataclassInstance) -> None:
    """None of the options for code may be given beside a check.

    Raises:
        UsageError: names those that are.
    """
    given = [field.name for field in fields(code) if getattr(code, field.name) != field.default]
    alien = [f"--{name.replace('_', '-')}" for name in given if name not in _SHARED]
    if alien:
        raise UsageError(f"{', '.join(alien)}: for findings in code only", fix="check the code in a call of its own")


def run_guarded(words: list[str]) -> NoReturn:
    """Become the command, with the fork guard in every Python that it starts.

    Raises:
        UsageError: there is no command.
    """
    from helixctl.doctor.guard import guarded_environment

    if not words:
        raise UsageError("--run: there is no command", fix="helixctl doctor --run -- python train.py")
    try:
        os.execvpe(words[0], words, guarded_environment(os.environ))
    except OSError as error:
        problem = HelixError(f"{words[0]} cannot be started: {error.strerror}", fix="check the command behind --")
        problem.exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        raise problem from None


def _refuse(words: list[str], options: CheckOptions, fail_on: str, output_format: str) -> None:
    if options.run and options != replace(NO_CHECKS, run=True):
        raise UsageError("--run stands alone", fix="check the machine or the recipe in a call of its own")
    if options.report and (options.as_json or output_format == "json"):
        raise UsageError("--report is text for people", fix="leave out --report: --env --json has the same checks")
    if words and not options.run:
        raise UsageError(
            f"{words[0]}: code is not checked together with a machine or a recipe",
            fix="check it in a call of its own: helixctl doctor PATHS",
        )
    unknown = sorted(set(options.require) - _known_ids()) if options.require else []
    if unknown:
        raise UsageError(f"--require: there is no check {', '.join(unknown)}", fix="take an ID from the output")
    if options.recipe is None and (options.live or options.set_):
        option = "--live" if options.live else "--set"
        raise UsageError(f"{option} needs a recipe", fix=f"helixctl doctor --recipe RECIPE {option}")
    if options.require and not (options.env or options.report or options.recipe):
        raise UsageError("--require needs checks", fix=f"helixctl doctor --env --require {options.require[0]}")
    if options.recipe is not None and not options.recipe.is_file():
        found = f"{options.recipe} is a folder" if options.recipe.is_dir() else f"there is no {options.recipe}"
        raise UsageError(f"--recipe: {found}", fix="name a recipe file")
    if fail_on not in _FAIL_ON:
        raise UsageError(f"--fail-on: there is no level {fail_on!r}", fix=f"use one of: {', '.join(_FAIL_ON)}")
    if output_format not in _FORMATS:
        raise UsageError(f"--format {output_format} is for findings in code", fix="use text or json here")


def _known_ids() -> set[str]:
    from helixctl.doctor.environment import ENVIRONMENT
    from helixctl.doctor.probe import LIVE_IDS
    from helixctl.doctor.recipe_check import RECIPE

    return {probe.id for probe in ENVIRONMENT} | {probe.id for probe in RECIPE} | set(LIVE_IDS)


def _outcomes(options: CheckOptions, host: Host) -> Iterator[Outcome]:
    parts: list[Iterable[Outcome]] = []
    if options.env or (options.report and options.recipe is None):
        parts.append(_machine(host))
    if options.recipe is not None:
        parts.append(_recipe(options.recipe, options, host))
    return chain.from_iterable(parts)


def _machine(host: Host) -> Iterator[Outcome]:
    from helixctl.doctor.environment import ENVIRONMENT
    from helixctl.doctor.probe import run_probes

    yield from run_probes(ENVIRONMENT, host)


def _recipe(path: Path, options: CheckOptions, host: Host) -> Iterator[Outcome]:
    from helixctl.doctor.recipe_check import check_recipe
    from helixctl.machine import read_machine

    failed = False
    for outcome in check_recipe(path, options.set_ or (), read_machine(), host):
        failed = failed or outcome.state == "fail"
        yield outcome
    if options.live:
        yield from _live(path, options, failed=failed)


def _live(path: Path, options: CheckOptions, *, failed: bool) -> Iterator[Outcome]:
    from helixctl.doctor.probe import Outcome

    if failed:
        text = "the recipe has to be in order first"
        yield Outcome("LIVE000", "target and drafter", "skip", text, "mend what failed above", 0.0)
        return
    with heavy_imports():
        from helixctl.cli.loading import load_plan
        from helixctl.doctor.live import prove_live
    with render.progress("proofs") as show_progress:
        yield from prove_live(
            load_plan(path, options.set_, decodes=True),
            on_progress=lambda what, done, total: show_progress(done, total, what),
        )
