"""One run of the static rules, from settings to a report: what `helixctl doctor [PATHS]` does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from helixctl.doctor import runner
from helixctl.doctor.baseline import count_known, read_baseline, subtract, write_baseline
from helixctl.doctor.catalog import selected
from helixctl.doctor.config import Config, FailOn, find_config, load_config
from helixctl.doctor.diff import changed_files
from helixctl.doctor.finding import LEVELS, Finding, Level
from helixctl.doctor.fixes import fix_files
from helixctl.doctor.listing import Report, fails, make_report
from helixctl.doctor.scan import ScanOptions, make_task
from helixctl.errors import UsageError
from helixctl.plugins import suggest
from helixctl.version import __version__


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None leaves it to the configuration."""

    paths: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str | None = None
    show: str | None = None
    baseline: Path | None = None
    write_baseline: bool = False
    diff_base: str | None = None
    fix: bool = False
    config: Path | None = None
    jobs: int = 0
    cache_folder: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The report, whether it fails the run, and what else was done."""

    report: Report
    failed: bool
    num_fixed: int = 0
    baseline: Path | None = None
    """The baseline that was written."""


def check_code(request: Request) -> Outcome:
    """Scan, mend, compare with what is known.

    Raises:
        UsageError: a path, rule, level, revision or setting that does not exist.
    """
    paths = [Path(path) for path in request.paths or (".",)]
    config = _configure(request, paths)
    rules = selected((*config.select, *config.extend_select), config.ignore)
    options = ScanOptions(tuple(rule.code for rule in rules), config.options)
    for words in config.per_file_ignores.values():
        selected(words, ())  # names wrong words before the work begins
    scanned = _scan(request, paths, config, options)
    num_fixed = 0
    if request.fix:
        num_fixed = fix_files(scanned.findings, config.root)
        scanned = _scan(request, paths, config, options) if num_fixed else scanned
    baseline = _baseline_path(request, config)
    if request.write_baseline:
        write_baseline(baseline or config.root / "doctor-baseline.json", scanned.findings)
        report = make_report([], scanned.num_files, config.show, len(scanned.findings), __version__)
        return Outcome(report, False, num_fixed, baseline or config.root / "doctor-baseline.json")
    new = list(scanned.findings)
    if request.diff_base is not None:
        new = _new_since(request.diff_base, new, paths, config, options)
    if baseline is not None:
        new = subtract(new, read_baseline(baseline))
    report = make_report(new, scanned.num_files, config.show, len(scanned.findings) - len(new), __version__)
    return Outcome(report, fails(new, config.fail_on), num_fixed)


def _configure(request: Request, paths: Sequence[Path]) -> Config:
    """The configuration of the project that the paths are in, with what the command line says instead."""
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise UsageError(f"there is no {', no '.join(missing)}", fix="check the path")
    if request.config is not None and not request.config.is_file():
        raise UsageError(f"--config: there is no {request.config}", fix="check the path")
    common = Path(os.path.commonpath([os.path.abspath(path) for path in paths]))
    found = request.config.absolute() if request.config is not None else find_config(common)
    config = load_config(found, Path.cwd())
    show: Level = _level(request.show, "--show") or ("info" if request.select else config.show)
    fail_on: FailOn = _fail_level(request.fail_on) or config.fail_on
    if fail_on != "never" and LEVELS.index(fail_on) < LEVELS.index(show):
        show = fail_on  # what fails a run is shown
    return replace(
        config,
        select=_words(request.select) or config.select,
        extend_select=(*config.extend_select, *_words(request.extend_select)),
        ignore=(*(() if request.select else config.ignore), *_words(request.ignore)),
        show=show,
        fail_on=fail_on,
    )


def _scan(request: Request, paths: Sequence[Path], config: Config, options: ScanOptions) -> runner.ScanResult:
    return runner.scan(paths, config, options, jobs=request.jobs, cache_folder=request.cache_folder)


def _new_since(
    base: str, findings: Sequence[Finding], paths: Sequence[Path], config: Config, options: ScanOptions
) -> list[Finding]:
    """Findings in files that differ from the base, those of the old versions taken out."""
    changed = changed_files(base, paths[0] if paths[0].is_dir() else paths[0].absolute().parent)
    old = []
    names = set()
    for file in changed:
        relative = runner.relative_path(file.path, config.root)
        names.add(relative)
        if file.old is not None and relative.endswith(runner.SUFFIXES):
            old.append((make_task(file.path, relative, config.ignored_for(relative)), file.old))
    in_changed = [finding for finding in findings if finding.path in names]
    return subtract(in_changed, count_known(runner.scan_texts(old, options)))


def _baseline_path(request: Request, config: Config) -> Path | None:
    return request.baseline.absolute() if request.baseline is not None else config.baseline


def _words(given: Sequence[str]) -> tuple[str, ...]:
    """`--select HX010,HX011 --select HX020`."""
    return tuple(word.strip() for text in given for word in text.split(",") if word.strip())


def _level(word: str | None, option: str) -> Level | None:
    if word is None:
        return None
    for level in LEVELS:
        if word == level:
            return level
    raise UsageError(f"{option}: there is no level {word!r}", fix=suggest(word, LEVELS))


def _fail_level(word: str | None) -> FailOn | None:
    return "never" if word == "never" else _level(word, "--fail-on")
