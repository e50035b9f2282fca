"""`doctor`: the linter for training code. What a machine or a recipe needs is in option groups of their own.

To add a group: a frozen dataclass of options as `CodeOptions` here, one more parameter of `doctor`, one branch in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from helixctl.cli import render
from helixctl.cli.doctor_checks import NO_CHECKS, CheckOptions, run_checks
from helixctl.cli.options import grouped

_RULES = "Rules"
_REPORT = "Report"

Paths = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATHS]...", help="Files and folders; the current folder if left out.", show_default=False),
]


@dataclass(frozen=True)
class CodeOptions:
    """Which rules look at the code, and how their findings come out."""

    select: Annotated[
        list[str] | None,
        typer.Option(metavar="RULES", help="Only these: codes, prefixes, names or ALL.", rich_help_panel=_RULES),
    ] = None
    extend_select: Annotated[
        list[str] | None, typer.Option(metavar="RULES", help="These too.", rich_help_panel=_RULES)
    ] = None
    ignore: Annotated[list[str] | None, typer.Option(metavar="RULES", help="Not these.", rich_help_panel=_RULES)] = None
    explain: Annotated[
        str | None, typer.Option(metavar="RULE", help="Print the documentation of a rule.", rich_help_panel=_RULES)
    ] = None
    list_rules: Annotated[bool, typer.Option("--list-rules", help="Print all rules.", rich_help_panel=_RULES)] = False
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend what can be mended without risk.", rich_help_panel=_RULES)
    ] = False
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="LEVEL", help="error (default), warning, info or never.", rich_help_panel=_REPORT),
    ] = None
    show: Annotated[
        str | None,
        typer.Option(metavar="LEVEL", help="Lowest level shown; warning if left out.", rich_help_panel=_REPORT),
    ] = None
    format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            envvar="HELIXCTL_DOCTOR_FORMAT",
            help="text, json, github, gitlab, sarif or junit.",
            rich_help_panel=_REPORT,
        ),
    ] = "text"
    output_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report there.", rich_help_panel=_REPORT)
    ] = None
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Known findings, not reported.", rich_help_panel=_REPORT)
    ] = None
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Take what is found now as known.", rich_help_panel=_REPORT)
    ] = False
    diff_base: Annotated[
        str | None,
        typer.Option(metavar="REV", help="Only what is new since this git revision.", rich_help_panel=_REPORT),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Configuration; the nearest pyproject.toml if left out."),
    ] = None
    jobs: Annotated[int, typer.Option(min=0, metavar="N", help="Processes; 0 is one per core.")] = 0
    cache_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", envvar="HELIXCTL_DOCTOR_CACHE", help="Where results are kept.")
    ] = None
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Look at every file again.")] = False


@grouped
def doctor(paths: Paths = None, code: CodeOptions = CodeOptions(), checks: CheckOptions = NO_CHECKS) -> None:
    """Check training code: fork after CUDA, loaders without a start method, threads, tokenizers, loading.

    Needs neither torch nor a GPU. Exit codes: 0 clean, 1 findings at or above --fail-on, 2 wrong use or a missing path.
    """
    if checks.any:
        run_checks([*(paths or [])], checks, fail_on=code.fail_on or "error", output_format=code.format)
    else:
        check_code([*(paths or [])], replace(code, format="json") if checks.as_json else code)


def check_code(paths: list[str], options: CodeOptions) -> None:
    """Scan, report, and end with 1 if something is at or above the fail level."""
    render.render_text("no rules yet")
