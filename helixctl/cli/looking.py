"""`helixctl runs` and `helixctl report`: looking at runs that are going on or over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from helixctl.cli import render
from helixctl.cli.loading import AsJson


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the runs are.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first: how each stands, and its best validation."""
    from helixctl.training.runs import list_runs

    found = list_runs(folder)
    if as_json:
        render.render_json(found)
    else:
        render.render_runs(found)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page; report.html in RUN if left out.")
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run: curves, positions, waits, memory, recipe, environment."""
    from helixctl.training.report import write_report

    render.render_text(f"wrote {write_report(run, output)}")
