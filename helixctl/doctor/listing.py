"""What a report shows: findings chosen by level, and how many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from helixctl.doctor.config import FailOn
from helixctl.doctor.finding import LEVELS, Finding, Level
from helixctl.errors import UsageError
from helixctl.plugins import load_plugin, plugin_names, suggest

FORMATS = "helixctl.doctor.formats"
_SUFFIX = "_report"


@dataclass(frozen=True)
class Report:
    """The result of a run. `findings` are those shown, by place."""

    findings: tuple[Finding, ...]
    num_files: int
    num_known: int = 0
    """Findings that the baseline or the base revision has as well."""
    num_hidden: int = 0
    """Findings below the level that is shown."""
    version: str = ""

    def count(self, level: Level) -> int:
        """Findings of that level."""
        return sum(finding.level == level for finding in self.findings)

    @property
    def summary(self) -> str:
        """One sentence."""
        counts = Counter(finding.level for finding in self.findings)
        found = ", ".join(
            f"{counts[level]} {level}{'s' * (counts[level] > 1 and level != 'info')}"
            for level in reversed(LEVELS)
            if counts[level]
        )
        known = f", {self.num_known} known" if self.num_known else ""
        return f"{found or 'nothing found'} in {self.num_files} file{'s' * (self.num_files != 1)}{known}"


def make_report(findings: Sequence[Finding], num_files: int, show: Level, num_known: int, version: str) -> Report:
    """Findings at or above `show`, sorted by place."""
    lowest = LEVELS.index(show)
    shown = sorted((f for f in findings if LEVELS.index(f.level) >= lowest), key=Finding.sort_key)
    return Report(tuple(shown), num_files, num_known, len(findings) - len(shown), version)


def fails(findings: Sequence[Finding], fail_on: FailOn) -> bool:
    """Whether something is at or above the level."""
    return fail_on != "never" and any(LEVELS.index(finding.level) >= LEVELS.index(fail_on) for finding in findings)


def format_names() -> tuple[str, ...]:
    """The formats that there are."""
    return tuple(name.removesuffix(_SUFFIX) for name in plugin_names(FORMATS) if name.endswith(_SUFFIX))


def check_format(name: str) -> None:
    """Raise UsageError where there is no such format."""
    if name not in format_names():
        raise UsageError(f"there is no format {name!r}", fix=suggest(name, format_names()))


def format_report(report: Report, name: str) -> str:
    """The report as text in the format `name`.

    Raises:
        UsageError: there is no such format.
    """
    check_format(name)
    text: str = load_plugin(FORMATS, name + _SUFFIX).format_report(report)
    return text
