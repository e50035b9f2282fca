"""One profile from end to end: what the command calls. Returns values, prints nothing."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helixctl.errors import HelixError
from helixctl.profiling.bottleneck import judge
from helixctl.profiling.facts import find_facts
from helixctl.profiling.files import write_files
from helixctl.profiling.finding import DEFAULTS, Thresholds
from helixctl.profiling.launch import launched
from helixctl.profiling.recording import OnProgress, Options, Recorder, Recording
from helixctl.profiling.report import About, Json, make_report
from helixctl.profiling.runs import Run, command_line, run_dir_of

_BASELINE_SHARE = 0.25
_LONGEST_BASELINE_S = 5.0


class NothingSampled(HelixError):
    """The process could not be looked at, or was gone at once."""

    exit_code = 3


@dataclass(frozen=True)
class Profile:
    """A finished profile."""

    report: Json
    files: dict[str, Path]
    """What was written, by name."""

    @property
    def has_failed(self) -> bool:
        """The profiled process failed, or a stage of it hangs."""
        return bool(self.report["verdict"]["code"] == "V8")


def profile_recipe(
    recipe: Path, overrides: Sequence[str], options: Options, output: Path, on_progress: OnProgress
) -> Profile:
    """Start a run of ``recipe``, look at it, end it, and write the report to ``output``.

    Raises:
        RunFailed: it ended before it could be looked at.
    """
    with launched(recipe, overrides, output, cuda=options.cuda) as run:
        seen = _record(run.pid, run.run_dir, _with_baseline(options), on_progress)
        if seen.has_ended and not seen.window_at:
            run.raise_if_failed()
        about = About("recipe", f"helixctl train {recipe}", _notes(seen))
        return _report(seen, about, output)


def profile_process(run: Run, options: Options, output: Path, on_progress: OnProgress) -> Profile:
    """Look at a process that runs already, ours or any Python's, and write the report to ``output``."""
    options = _with_baseline(options) if run.run_dir is not None else options
    seen = _record(run.pid, run.run_dir, options, on_progress)
    return _report(seen, About("pid", run.command, _notes(seen)), output)


def find_process(pid: int, run_dir: Path | None = None) -> Run:
    """A process by its number; its run directory is found if none is given, and None where it is no run of ours."""
    return Run(pid, run_dir or run_dir_of(pid), command_line(pid))


def _with_baseline(options: Options) -> Options:
    if not options.stacks_hz:
        return options
    return dataclasses.replace(options, baseline_s=min(_BASELINE_SHARE * options.seconds, _LONGEST_BASELINE_S))


def _record(pid: int, run_dir: Path | None, options: Options, on_progress: OnProgress) -> Recording:
    try:
        with tempfile.TemporaryDirectory(prefix="helixctl-profile-") as folder:
            return Recorder(pid, run_dir, options, Path(folder)).record(on_progress)
    except ProcessLookupError:
        raise NothingSampled(f"process {pid} has ended") from None


def _notes(seen: Recording) -> tuple[str, ...]:
    notes = []
    if seen.native is not None:
        notes.append(seen.native.problem or f"classes of stacks are those of {seen.native.ticks} native looks")
    if seen.stacks.late_samples:
        notes.append(f"py-spy was late {seen.stacks.late_samples} times: the machine is busy, or the rate too high")
    return tuple(notes)


def _report(seen: Recording, about: About, output: Path, thresholds: Thresholds = DEFAULTS) -> Profile:
    failed = seen.last_status is not None and seen.last_status["phase"] == "failed"
    if len(seen.threads) < 2 and not failed:
        raise NothingSampled(
            f"nothing could be seen of process {seen.pid}: it ended, or may not be read",
            fix="profile a process that goes on, as the same user",
        )
    facts = find_facts(seen)
    report = make_report(seen, facts, judge(facts, thresholds), about)
    return Profile(report, write_files(output, report, seen, facts))
