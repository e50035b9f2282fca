"""`profile`: which stage limits a run and why, with numbers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from helixctl.cli import render
from helixctl.cli.options import grouped
from helixctl.cli.process import heavy_imports
from helixctl.errors import UsageError

if TYPE_CHECKING:
    from helixctl.profiling.recording import Options
    from helixctl.profiling.runs import Run
    from helixctl.profiling.session import Profile

_DEFAULT_SECONDS = 20.0
_THREADS_SECONDS = 5.0
_LONGEST_SECONDS = 3600.0
_WARMUP_S = 2.0
_WARMUP_ITEMS = 8
_LIVE_EVERY_S = 1.0
_LOOKING = "How to look"

RecipePath = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="Recipe to run while it is profiled.", show_default=False)
]


@dataclass(frozen=True)
class SubjectOptions:
    """What is looked at."""

    pid: Annotated[int | None, typer.Option(metavar="PID", help="A running process, ours or any Python's.")] = None
    run_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Run directory of --pid, where it cannot be found.")
    ] = None
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace one option of the recipe.")
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Two reports side by side; profiles nothing.")
    ] = None
    as_subject: Annotated[bool, typer.Option("--as-subject", hidden=True)] = False


@dataclass(frozen=True)
class LookOptions:
    """How long, how often, how deep."""

    seconds: Annotated[float | None, typer.Option(min=1, metavar="S", help="Length of the window; 20 if left out.")] = (
        None
    )
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="End after N steps instead.")] = None
    threads: Annotated[
        bool, typer.Option("--threads", help="The thread table alone, without stacks; 5 s if no time is given.")
    ] = False
    live: Annotated[bool, typer.Option("--live", help="Refresh a full screen until Ctrl-C.")] = False
    native: Annotated[
        bool,
        typer.Option("--native", help="A burst with C and CUDA symbols at the end; slows the run for 3 s."),
    ] = False
    cuda: Annotated[
        bool,
        typer.Option("--cuda", help="Trace kernels and CUDA calls of all threads for 2 s at the end; needs RECIPE."),
    ] = False
    rate: Annotated[
        float, typer.Option(min=1, max=5, metavar="HZ", help="Looks at threads a second.", rich_help_panel=_LOOKING)
    ] = 2.0
    stacks_rate: Annotated[
        int,
        typer.Option(min=0, max=100, metavar="HZ", help="Looks at stacks a second; 0: none.", rich_help_panel=_LOOKING),
    ] = 20
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where the report goes; run.dir/profile if left out."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json.")] = False


@grouped
def profile(
    recipe: RecipePath = None, subject: SubjectOptions = SubjectOptions(), look: LookOptions = LookOptions()
) -> None:
    """Say which stage limits a run and why: threads, stacks, channels, GPUs.

    Runs RECIPE, or looks at --pid, or at this user's one running training.

    Exit codes: 0 a report was made, 1 the run failed or hangs, 2 wrong use, 3 nothing could be seen.
    """
    _refuse(recipe, subject, look)
    if subject.compare is not None:
        _compare(*subject.compare)
    elif subject.as_subject and recipe is not None:
        _be_subject(recipe, subject, cuda=look.cuda)
    elif look.live:
        _show_live(recipe, subject, look)
    else:
        _profile(recipe, subject, look)


def _refuse(recipe: Path | None, subject: SubjectOptions, look: LookOptions) -> None:
    if recipe is not None and subject.pid is not None:
        raise UsageError("a recipe and --pid exclude each other", fix="give one of them")
    if subject.compare is not None and (recipe is not None or subject.pid is not None):
        raise UsageError("--compare stands alone", fix="helixctl profile --compare A B")
    if subject.run_dir is not None and subject.pid is None:
        raise UsageError("--run-dir needs --pid", fix="helixctl profile --pid PID --run-dir FOLDER")
    if look.steps is not None and look.seconds is not None:
        raise UsageError("--steps and --seconds exclude each other", fix="give one of them")
    if subject.set_ and recipe is None:
        raise UsageError("--set needs a recipe", fix="helixctl profile RECIPE --set KEY=VALUE")
    if look.cuda and recipe is None and subject.compare is None:
        text = "--cuda needs a recipe: only a run that was started for it can trace its kernels"
        raise UsageError(text, fix="helixctl profile RECIPE --cuda, or --native for a process that runs already")
    if look.live and not render.is_screen():
        raise UsageError("--live needs a terminal", fix="leave --live out, or use --threads")


def _profile(recipe: Path | None, subject: SubjectOptions, look: LookOptions) -> None:
    from helixctl.profiling.session import profile_process, profile_recipe

    options = _options(look)
    with render.progress("profile") as show_progress:

        def on_progress(what: str, done: float, total: float) -> None:
            show_progress(round(10 * done), round(10 * total) or None, what)

        if recipe is not None:
            output = _recipe_output(recipe, subject, look)
            done = profile_recipe(recipe, subject.set_ or [], options, output, on_progress)
        else:
            run = _find(subject)
            done = profile_process(run, options, look.output or _default_output(run), on_progress)
    _show(done, look)


def _show(done: Profile, look: LookOptions) -> None:
    if look.as_json:
        render.render_json(done.report)
    elif look.threads:
        render.render_threads(done.report)
    else:
        render.render_profile(done.report, [str(done.files[name]) for name in ("profile.html", "report.json")])
    if done.has_failed:
        raise typer.Exit(1)


def _options(look: LookOptions) -> Options:
    from helixctl.profiling.recording import Options

    usual_s = _LONGEST_SECONDS if look.steps is not None else _THREADS_SECONDS if look.threads else _DEFAULT_SECONDS
    return Options(
        seconds=look.seconds if look.seconds is not None else usual_s,
        steps=look.steps,
        threads_hz=look.rate,
        stacks_hz=0 if look.threads else look.stacks_rate,
        warmup_s=_WARMUP_S,
        warmup_items=_WARMUP_ITEMS,
        native=look.native,
        cuda=look.cuda,
    )


def _recipe_output(recipe: Path, subject: SubjectOptions, look: LookOptions) -> Path:
    """Where the report goes; mistakes in the recipe are told before anything starts."""
    from helixctl.cli.loading import load_any_plan

    plan = load_any_plan(recipe, subject.set_)
    return (look.output or plan.recipe.run.dir / "profile").absolute()


def _find(subject: SubjectOptions) -> Run:
    from helixctl.profiling.runs import check_process, only_run
    from helixctl.profiling.session import find_process

    if subject.pid is None:
        return only_run()
    check_process(subject.pid)
    return find_process(subject.pid, subject.run_dir)


def _default_output(run: Run) -> Path:
    return run.run_dir / "profile" if run.run_dir is not None else Path(f"profile-{run.pid}")


def _be_subject(recipe: Path, subject: SubjectOptions, *, cuda: bool) -> None:
    """The run that is looked at, in a process of its own."""
    from helixctl.cli.loading import load_any_plan
    from helixctl.profiling.launch import STATUS_EVERY_S, become_subject

    become_subject()
    plan = load_any_plan(recipe, subject.set_)
    with heavy_imports():
        from helixctl.training.cuda_trace import traced_on_request
        from helixctl.training.run import run_training
    with traced_on_request(plan.recipe.run.dir) if cuda else nullcontext():
        run_training(plan, status_every_s=STATUS_EVERY_S)


def _show_live(recipe: Path | None, subject: SubjectOptions, look: LookOptions) -> None:
    from helixctl.profiling.launch import launched
    from helixctl.profiling.runs import Run

    if recipe is None:
        _refresh(_find(subject), look.seconds)
        return
    with launched(recipe, subject.set_ or [], _recipe_output(recipe, subject, look)) as started:
        _refresh(Run(started.pid, started.run_dir, f"helixctl train {recipe}"), look.seconds)


def _refresh(run: Run, seconds: float | None) -> None:
    from helixctl.cli.profile_tables import live_view
    from helixctl.profiling.live import looks

    with render.live_screen() as show:
        for now in looks(run, _LIVE_EVERY_S, seconds):
            show(live_view(now, f"{run.pid}  {run.command}"))


def _compare(before: Path, after: Path) -> None:
    from helixctl.profiling.compare import compare, load_report

    render.render_comparison(compare(load_report(before), load_report(after)))
