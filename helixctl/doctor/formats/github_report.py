"""GitHub Actions annotations. GitHub shows ten per level and step, so errors come first and the rest is counted."""

from __future__ import annotations

from helixctl.doctor.finding import LEVELS, Finding, Level
from helixctl.doctor.listing import Report

MAX_PER_LEVEL = 10
_COMMANDS: dict[Level, str] = {"error": "error", "warning": "warning", "info": "notice"}


def format_report(report: Report) -> str:
    """Workflow commands, then the summary. All findings are in the other formats."""
    lines = []
    for level in reversed(LEVELS):
        found = [finding for finding in report.findings if finding.level == level]
        lines += [_annotation(finding) for finding in found[:MAX_PER_LEVEL]]
        lines += [finding.where + f": {finding.code} {finding.message}" for finding in found[MAX_PER_LEVEL:]]
        if len(found) > MAX_PER_LEVEL:
            text = f"and {len(found) - MAX_PER_LEVEL} more of level {level}, in the log of this step"
            lines.append(f"::{_COMMANDS[level]} title=helixctl doctor::{text}")
    return "\n".join([*lines, report.summary]) + "\n"


def _annotation(finding: Finding) -> str:
    place = f"file={_property(finding.path)}"
    if finding.cell is None:
        place += f",line={finding.line},col={finding.column},endLine={finding.end_line},endColumn={finding.end_column}"
    title = _property(f"{finding.code} {finding.name}")
    message = f"{finding.where}: {finding.code} {finding.message}. {finding.fix}"
    return f"::{_COMMANDS[finding.level]} title={title},{place}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
