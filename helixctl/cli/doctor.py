"""`doctor`: the linter for training code. What a machine or a recipe needs is in option groups of their own.

To add a group: a frozen dataclass of options as `CodeOptions` here, one more parameter of `doctor`, one branch in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from helixctl.cli import render
from helixctl.cli.doctor_checks import NO_CHECKS, CheckOptions, refuse_code_options, run_checks
from helixctl.cli.options import grouped

if TYPE_CHECKING:
    from helixctl.doctor.checkup import Outcome

_RULES = "Rules"
_REPORT = "Report"

Paths = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATHS", help="Files and folders; the current folder if left out.", show_default=False),
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
        refuse_code_options(code)
        run_checks([*(paths or [])], checks, fail_on=code.fail_on or "error", output_format=code.format)
    else:
        check_code([*(paths or [])], replace(code, format="json") if checks.as_json else code)


def check_code(paths: list[str], options: CodeOptions) -> None:
    """Scan, report, and end with 1 if something is at or above the fail level."""
    from helixctl.doctor.cache import default_folder
    from helixctl.doctor.checkup import Request, check_code
    from helixctl.doctor.listing import check_format, format_report

    if options.list_rules or options.explain is not None:
        _show_rules(options)
        return
    check_format(options.format)
    outcome = check_code(
        Request(
            paths=tuple(paths),
            select=tuple(options.select or ()),
            extend_select=tuple(options.extend_select or ()),
            ignore=tuple(options.ignore or ()),
            fail_on=options.fail_on,
            show=options.show,
            baseline=options.baseline,
            write_baseline=options.write_baseline,
            diff_base=options.diff_base,
            fix=options.fix,
            config=options.config,
            jobs=options.jobs,
            cache_folder=None if options.no_cache else options.cache_dir or default_folder(),
        )
    )
    text = format_report(outcome.report, options.format)
    if options.output_file is not None:
        from helixctl.checkpoint.atomic import write_output

        write_output(options.output_file, text, "--output-file", parents=True)
        render.render_text(outcome.report.summary)
    else:
        render.render_text(text)
    render.render_warnings(_notes(outcome))
    if outcome.failed:
        raise typer.Exit(1)


def _notes(outcome: Outcome) -> list[str]:
    """What was done beside reporting."""
    notes = [f"{outcome.num_fixed} findings were mended in place"] if outcome.num_fixed else []
    if not outcome.report.num_files:
        notes.append("no file was looked at: check the paths, and what [tool.helixctl.doctor] excludes")
    if outcome.baseline is not None:
        notes.append(f"{outcome.report.num_known} findings are known from now on: {outcome.baseline}")
    return notes


def _show_rules(options: CodeOptions) -> None:
    """The documentation of one rule, or a line per rule."""
    from helixctl.doctor.catalog import all_rules, find_rule

    rules = all_rules() if options.explain is None else (find_rule(options.explain),)
    if options.format == "json":
        render.render_json([{k: v for k, v in vars(rule).items() if k not in ("check", "markers")} for rule in rules])
    elif options.explain is not None:
        render.render_text(f"{rules[0].documentation}\n\nName: {rules[0].name}. Level: {rules[0].level}.")
    else:
        width = max(len(rule.name) for rule in rules)
        render.render_text("\n".join(f"{r.code}  {r.name:{width}}  {r.level:7}  {r.title}" for r in rules))
