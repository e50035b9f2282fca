"""The rules over one file: bytes in, findings out. Runs in worker processes as well."""

from __future__ import annotations

import symtable
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from helixctl.doctor.catalog import Rule, all_rules, find_rule, matches
from helixctl.doctor.finding import Finding, Hit
from helixctl.doctor.source import RuleOptions, Source, Unparsable, decode, module_of
from helixctl.doctor.suppress import MARKER, apply, read_suppressions

_UNPARSABLE = "HX902"


@dataclass(frozen=True)
class FileTask:
    """One file to look at. `relative` is its path in reports, `module` the parts of its dotted name."""

    relative: str
    module: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    """Rules that are off for this file: codes, prefixes or names."""


@dataclass(frozen=True)
class ScanOptions:
    """The same for all files of a run."""

    codes: tuple[str, ...]
    rules: RuleOptions


def scan_file(path: Path, task: FileTask, options: ScanOptions) -> list[Finding]:
    """All findings in a file, those that its comments suppress left out, by place."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return [_unparsable(task.relative, Unparsable(f"cannot be read: {error.strerror}"))]
    return scan_content(content, task, options)


def scan_content(content: bytes, task: FileTask, options: ScanOptions) -> list[Finding]:
    """As `scan_file`, for the content of a file."""
    active = _active(options.codes, task.ignored)
    codes = frozenset(rule.code for rule in active)
    concerned = [rule for rule in active if rule.concerns(content)]
    try:
        text = decode(content)
        if not concerned and MARKER not in content and not task.relative.endswith(".ipynb") and _is_valid(text):
            return []
        source = Source(task.relative, text, options.rules, task.module)
    except Unparsable as error:
        return [_unparsable(task.relative, error)] if _UNPARSABLE in codes else []
    raw = [_finding(source, rule, hit) for rule in concerned for hit in _check(rule, source)]
    kept = apply(list(dict.fromkeys(raw)), read_suppressions(source.text), _known(), codes)
    return sorted(_complete(source, kept, codes), key=Finding.sort_key)


def make_task(path: Path, relative: str, ignored: Sequence[str]) -> FileTask:
    """A task for a file on disk."""
    return FileTask(relative, module_of(path), tuple(ignored))


def _check(rule: Rule, source: Source) -> Iterator[Hit]:
    if rule.check is None:
        return
    try:
        yield from rule.check(source)
    except Exception as error:
        error.add_note(f"while {rule.code} looked at {source.path}")  # a bug of ours: the report of it names the place
        raise


def _is_valid(text: str) -> bool:
    """Whether the text is Python; a third cheaper than a tree of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            symtable.symtable(text, "file", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


@cache
def _active(codes: tuple[str, ...], ignored: tuple[str, ...]) -> tuple[Rule, ...]:
    return tuple(rule for rule in all_rules() if rule.code in codes and not matches(rule, ignored))


@cache
def _known() -> dict[str, str]:
    """Codes and names, in lower case, to codes."""
    return {word.lower(): rule.code for rule in all_rules() for word in (rule.code, rule.name)}


def _finding(source: Source, rule: Rule, hit: Hit) -> Finding:
    """A hit with its rule; lines are still those of the joined text of a notebook, columns count characters."""
    node = hit.node
    line, end = node.lineno, node.end_lineno or node.lineno
    return Finding(
        code=rule.code,
        name=rule.name,
        level=hit.level or rule.level,
        path=source.path,
        line=line,
        column=_column(source.lines, line, node.col_offset),
        end_line=end,
        end_column=_column(source.lines, end, node.end_col_offset or 0),
        message=hit.message,
        fix=rule.fix,
        edits=hit.edits,
    )


def _complete(source: Source, findings: list[Finding], codes: frozenset[str]) -> Iterator[Finding]:
    """Add names, the source line and the cell; drop findings about suppressions that nobody asked for."""
    for finding in findings:
        if finding.code not in codes:
            continue
        rule = find_rule(finding.code)
        text = source.lines[finding.line - 1].strip() if finding.line <= len(source.lines) else ""
        full = replace(finding, name=rule.name, path=source.path, text=text, fix=finding.fix or rule.fix)
        if source.places is not None:
            cell, line = source.places[finding.line - 1]
            last_cell, last = source.places[finding.end_line - 1]
            full = replace(full, cell=cell, line=line, end_line=last if last_cell == cell else line, edits=())
        yield full


def _unparsable(path: str, error: Unparsable) -> Finding:
    rule = find_rule(_UNPARSABLE)
    return Finding(
        rule.code,
        rule.name,
        rule.level,
        path,
        error.line,
        error.column,
        error.line,
        error.column,
        error.message,
        rule.fix,
    )


def _column(lines: list[str], line: int, offset: int) -> int:
    """The column of a byte offset, counted from 1 in characters."""
    text = lines[line - 1] if line <= len(lines) else ""
    return offset + 1 if text.isascii() else len(text.encode()[:offset].decode(errors="replace")) + 1
