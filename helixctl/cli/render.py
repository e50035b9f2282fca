"""The only module that prints: results to stdout, errors, warnings and progress to stderr. 100 columns at most."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from helixctl.cli.values import format_value, record_rows
from helixctl.errors import HelixError, Problem, RecipeError, StageFailed
from helixctl.redact import redact_text

if TYPE_CHECKING:
    from helixctl.checkpoint.check import CheckResult
    from helixctl.checkpoint.export import ExportResult
    from helixctl.data.prepare import PrepareResult
    from helixctl.data.regenerate import RegenerateResult
    from helixctl.doctor.probe import Outcome
    from helixctl.lm_plan import AnyPlan
    from helixctl.profiling.compare import Comparison
    from helixctl.training.results import TrainResult, ValidationResult
    from helixctl.training.runs import RunSummary

WIDTH = 100
_REDRAW_S = 0.2
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421, 0x9B: 0x241B}
_STATE_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_SEVERITY_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "dim"}
_SEGMENT_STYLES = {"draft": "green", "bonus": "yellow", "prefill": "cyan"}


def render_error(error: HelixError) -> None:
    """What is wrong, where, and the fix."""
    if isinstance(error, StageFailed) and error.__cause__ and not isinstance(error.__cause__, HelixError):
        _print_traceback(error.__cause__)
    console = _console(stderr=True)
    if isinstance(error, RecipeError):
        count = len(error.problems)
        console.print(Text.assemble(("error", "bold red"), f": {count} mistake{'s' * (count > 1)} in the recipe"))
        for problem in error.problems:
            _print_problem(console, problem)
    else:
        _print_message(console, Text.assemble(("error", "bold red"), f": {error.message}"))
        _print_fix(console, error.fix)
    _print_message(console, Text(f"more: helixctl docs {error.page}", style="dim"), indent=2)


def render_bug(error: Exception) -> None:
    """An error that no user can mend."""
    _print_traceback(error)
    _console(stderr=True).print(Text.assemble(("error", "bold red"), ": this is a bug in helixctl; please report it"))


def render_stopped() -> None:
    """The user pressed Ctrl-C."""
    _console(stderr=True).print("stopped", style="yellow")


def render_warnings(warnings: Sequence[str]) -> None:
    """Sentences that a user should read before a run."""
    console = _console(stderr=True)
    for warning in warnings:
        _print_message(console, Text.assemble(("warning", "bold yellow"), f": {warning}"))


def render_outcomes(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Checks of a machine or a recipe, each as soon as it is there, and their number; returns them."""
    from helixctl.doctor.probe import count_states

    console = _console()
    shown: list[Outcome] = []
    for outcome in outcomes:
        shown.append(outcome)
        state, name = (f"{outcome.state:<4}", _STATE_STYLES[outcome.state]), (outcome.name, "bold")
        _print_message(console, Text.assemble(state, f"  {outcome.id:<7}  ", name, f": {_visible(outcome.message)}"))
        if outcome.remedy:
            _print_message(console, Text.assemble(("fix", "bold green"), f": {outcome.remedy}"), indent=15)
    console.print(Text(", ".join(f"{count} {state}" for state, count in count_states(shown).items()), style="bold"))
    return shown


def render_text(text: str) -> None:
    """Text for another program, as it is."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def render_markdown(text: str) -> None:
    """A page of the documentation: laid out for a terminal, as it was written for a file or a pipe."""
    console = _console()
    if not console.is_terminal:
        render_text(text)
        return
    from rich.markdown import Markdown

    console.print(Markdown(re.sub(r"<!--.*?-->|</?div[^>]*>", "", text), hyperlinks=False))


def render_json(content: Any) -> None:
    """A result for another program: dataclasses, paths and plain values as indented JSON."""
    render_text(json.dumps(content, indent=2, default=_plain))


def render_plan(plan: AnyPlan) -> None:
    """What a recipe will cost, before it runs."""
    from helixctl.cli.lm_tables import lm_plan_sections
    from helixctl.cli.tables import memory_table, plan_sections
    from helixctl.plan import Plan

    console = _console()
    for title, rows in plan_sections(plan) if isinstance(plan, Plan) else lm_plan_sections(plan):
        _print_section(console, title, rows)
    console.print(Text("memory (estimate)", style="bold"))
    console.print(Padding(memory_table(plan.memory), (0, 0, 1, 2), expand=False))
    render_warnings(plan.warnings)


def render_init(path: Path, findings: Sequence[str]) -> None:
    """The recipe that was written, what was found out, and what to do next."""
    console = _console()
    _print_message(console, Text.assemble("wrote ", (str(path), "bold")))
    for finding in findings:
        _print_message(console, Text(finding), indent=2)
    name = shlex.quote(str(path))
    _print_message(console, Text(f"next: helixctl prepare {name}, then helixctl train {name}"))


def render_train_result(result: TrainResult) -> None:
    """The end of a training run."""
    from helixctl.cli.tables import train_rows

    title = "training finished" if result.finished else "training stopped; go on with --resume"
    _print_section(_console(), title, train_rows(result))


def render_section(title: str, rows: Mapping[str, str], *tables: Table) -> None:
    """A title, labels with their texts, and tables."""
    console = _console()
    _print_section(console, title, rows)
    for table in tables:
        console.print(Padding(table, (0, 0, 1, 2), expand=False))


def render_prepare(result: PrepareResult) -> None:
    """What `prepare` kept, and what it dropped for which reason."""
    from helixctl.cli.tables import prepare_rows

    _print_section(_console(), "prepared", prepare_rows(result))


def render_record(title: str, record: Any) -> None:
    """The fields of a result under a title."""
    _print_section(_console(), title, record_rows(record))


def render_regeneration(result: RegenerateResult) -> None:
    """What became of the prompts."""
    _print_section(_console(), "answered by the target", record_rows(result))


def render_export(result: ExportResult) -> None:
    """Where the export is, how it compares with the drafter, and how to serve it."""
    console = _console()
    rows = record_rows(result)
    _print_section(console, "exported", {name: text for name, text in rows.items() if not name.startswith("commands.")})
    for engine, command in result.commands.items():
        console.print(Text(f"serve with {engine}", style="bold"))
        _print_message(console, Text(f"{command}\n"), indent=2)


def render_check(result: CheckResult) -> None:
    """A published drafter: what is wrong with it, and what each engine would do with it."""
    console = _console()
    head = {name: format_value(name, getattr(result, name)) for name in ("dir", "format", "tensors", "parameters")}
    _print_section(console, f"a drafter of {result.algorithm}", head)
    for finding in result.findings:
        whom = f" ({', '.join(finding.engines)})" if finding.engines else ""
        severity = (finding.severity, _SEVERITY_STYLES[finding.severity])
        _print_message(console, Text.assemble(severity, f"{whom}: {_visible(finding.message)}"))
        _print_fix(console, finding.fix)
    for view in result.engines:
        state = "reads it" if view.reads else "does not read it as it was meant"
        _print_section(console, f"{view.engine}: {state}", view.uses)


def render_runs(runs: Sequence[RunSummary]) -> None:
    """A line per run."""
    from helixctl.cli.tables import run_table

    console = _console()
    console.print(run_table(runs) if runs else Text("no runs here", style="dim"))


def render_validation(result: ValidationResult) -> None:
    """Decoded prompts, held-out metrics, scores by source, losslessness and speed."""
    from helixctl.cli.tables import confidence_table, position_table, source_table, validation_sections

    console = _console()
    for prompt in result.prompts:
        for turn in prompt.turns:
            console.print(Text(f"> {_visible(turn.prompt.strip()[-300:])}", style="dim"))
            render_answer([(segment.text, segment.kind) for segment in turn.segments])
            same = {None: "", True: ", same as plain decoding", False: ", differs from plain decoding"}[turn.identical]
            mean = "one token" if turn.accept_len is None else f"accept_len {turn.accept_len:.2f}"
            console.print(Text(f"{turn.num_tokens} tokens, {mean}{same}\n", style="dim"))
    for title, rows in validation_sections(result):
        _print_section(console, title, rows)
    tables = []
    if result.sources:
        tables += [("sources", source_table(result)), ("accepted by position", position_table(result))]
    if result.confidence is not None:
        tables.append(("accepted by what the drafter expected", confidence_table(result.confidence)))
    for title, table in tables:
        console.print(Text(title, style="bold"))
        console.print(Padding(table, (0, 0, 1, 2), expand=False))


def render_answer(segments: Sequence[tuple[str, str]]) -> None:
    """A decoded answer, coloured by who proposed each piece: (text, draft | bonus | prefill)."""
    _console().print(Text.assemble(*((_visible(text), _SEGMENT_STYLES.get(kind, "")) for text, kind in segments)))


def render_sample(tokens: Sequence[str], mask: Sequence[bool], title: str = "") -> None:
    """A prepared document; supervised tokens stand out (green, or between « and » where there is no colour)."""
    console, text = _console(), Text()
    plain = not console.is_terminal
    for i, (token, supervised) in enumerate(zip(tokens, mask, strict=True)):
        opens = supervised and (i == 0 or not mask[i - 1])
        closes = supervised and (i + 1 == len(mask) or not mask[i + 1])
        piece = ("«" if plain and opens else "") + _visible(token) + ("»" if plain and closes else "")
        text.append(piece, "bold green" if supervised else "dim")
    if title:
        console.print(Text(title, style="bold"))
    console.print(text)
    console.print(Text(f"{sum(mask)} of {len(mask)} tokens are supervised\n", style="dim"))


def render_profile(report: dict[str, Any], files: Sequence[str]) -> None:
    """The verdict of a profile, its tables, and where the files are."""
    from helixctl.cli.profile_tables import profile_blocks

    _print_blocks(profile_blocks(report, files))


def render_threads(report: dict[str, Any]) -> None:
    """The thread table of a profile."""
    from helixctl.cli.profile_tables import footer, thread_table

    _print_blocks([thread_table(report["threads"]), *(Text(line, style="dim") for line in footer(report))])


def render_comparison(comparison: Comparison) -> None:
    """Two profiles side by side."""
    from helixctl.cli.profile_tables import comparison_blocks

    _print_blocks(comparison_blocks(comparison))


def is_screen() -> bool:
    """True where a full-screen view can be shown."""
    return _console().is_terminal


@contextmanager
def live_screen() -> Iterator[Callable[[RenderableType], None]]:
    """Gives a function that replaces the whole screen; the old screen comes back at the end."""
    from rich.live import Live

    # No refresh thread of rich's own: threads belong to the engine.
    with Live(console=Console(highlight=False), screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda view: live.update(view, refresh=True)


class ShowProgress(Protocol):
    """What a long command calls on its way."""

    def __call__(self, done: int, total: int | None = None, what: str | None = None) -> None:
        """Come to ``done`` of ``total``, None where nobody knows; every new ``what`` gets a bar of its own."""


@contextmanager
def progress(title: str) -> Iterator[ShowProgress]:
    """Shows on stderr how far a command is, a few times a second. Silent where nobody watches."""
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = _console(stderr=True)
    tasks: dict[str, TaskID] = {}
    shown_at = 0.0
    # No refresh thread of rich's own: threads belong to the engine.
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:

        def show(done: int, total: int | None = None, what: str | None = None) -> None:
            nonlocal shown_at
            name = what or title
            is_new = name not in tasks
            if is_new:
                tasks[name] = bar.add_task(name, total=total)
            now = time.monotonic()
            # Called once per decoding cycle, whose speed is measured: drawing must not be what is measured.
            is_due = is_new or done == total or now - shown_at >= _REDRAW_S
            shown_at = now if is_due else shown_at
            bar.update(tasks[name], completed=done, total=total, refresh=is_due)

        yield show


def _console(*, stderr: bool = False) -> Console:
    """At most 100 columns; the same 100 where the output is no terminal."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def _print_problem(console: Console, problem: Problem) -> None:
    where = f"{problem.where}  " if problem.where else ""
    _print_message(console, Text.assemble("\n", (where, "dim"), (problem.key, "bold")))
    _print_message(console, Text(problem.message), indent=2)
    _print_fix(console, problem.fix)


def _print_fix(console: Console, fix: str | None) -> None:
    if fix:
        _print_message(console, Text.assemble(("fix", "bold green"), f": {fix}"), indent=2)


def _print_traceback(error: BaseException) -> None:
    sys.stderr.write(redact_text("".join(traceback.format_exception(error))))


def _print_message(console: Console, text: Text, indent: int = 0) -> None:
    """A sentence: wrapped for a person, one line for a file or a pipe, where people search. Secrets are taken out."""
    if (safe := redact_text(text.plain)) != text.plain:
        text = Text(safe)
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent), expand=False))
    else:
        console.print(Text(" " * indent) + text, soft_wrap=True)


def _print_blocks(blocks: Iterable[RenderableType]) -> None:
    console = _console()
    for block in blocks:
        console.print(block, soft_wrap=isinstance(block, Text) and not console.is_terminal)


def _print_section(console: Console, title: str, rows: Mapping[str, RenderableType]) -> None:
    table = Table.grid(padding=(0, 2))
    longest = max((cell_len(name) for name in rows), default=0)
    # Labels leave half of a narrow terminal to their texts.
    table.add_column(style="dim", width=min(longest, console.width // 2), overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value if not isinstance(value, str) else Text(value))
    console.print(Text(title, style="bold"))
    console.print(Padding(table, (0, 0, 1, 2), expand=False))


def _visible(text: str) -> str:
    """Control characters as pictures: what a model or a document writes must not move the user's cursor."""
    return text.translate(_PICTURES)


def _plain(value: Any) -> Any:
    """What json does not know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
