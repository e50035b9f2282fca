"""Two reports side by side: what changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixctl.errors import UsageError
from helixctl.profiling.files import REPORT
from helixctl.profiling.report import SCHEMA_VERSION, Json


@dataclass(frozen=True)
class Change:
    """One number in both reports; None where a report does not have it."""

    what: str
    before: float | None
    after: float | None
    unit: str
    """share, per_s, cores or s."""

    @property
    def factor(self) -> float | None:
        """After over before."""
        return self.after / self.before if self.before and self.after is not None else None


@dataclass(frozen=True)
class Comparison:
    """What two reports say, the older one first."""

    titles: tuple[str, str]
    changes: tuple[Change, ...]


def load_report(path: Path) -> Json:
    """A report, given by its file or its folder.

    Raises:
        UsageError: it is none, or of a later version.
    """
    file = path / REPORT if path.is_dir() else path
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{file} cannot be read as a report: {reason}", fix="name a report.json or its folder"
        ) from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise UsageError(f"{file} is no report of version {SCHEMA_VERSION}", fix="make it anew with helixctl profile")
    report: Json = content
    return report


def compare(before: Json, after: Json) -> Comparison:
    """Everything that both, or one of them, measured."""
    changes: list[Change] = []
    pipelines = [report["pipeline"] or {} for report in (before, after)]
    for name in ("tokens_per_s", "steps_per_s"):
        changes.append(Change(name, pipelines[0].get(name), pipelines[1].get(name), "per_s"))
    changes.append(Change("GIL held", before["gil_share"], after["gil_share"], "share"))
    stages = [{stage["name"]: stage for stage in report["stages"]} for report in (before, after)]
    for name in dict.fromkeys([*stages[0], *stages[1]]):
        pair = stages[0].get(name, {}), stages[1].get(name, {})
        if any("busy_share" in stage for stage in pair):
            changes.append(_change(f"{name} busy", "busy_share", pair, "share"))
            changes.append(_change(f"{name} items", "items_per_s", pair, "per_s"))
        changes.append(_change(f"{name} cores", "cores", pair, "cores"))
    channels = [{channel["name"]: channel for channel in report["channels"]} for report in (before, after)]
    for name in dict.fromkeys([*channels[0], *channels[1]]):
        pair = channels[0].get(name, {}), channels[1].get(name, {})
        changes.append(_change(f"channel {name} empty", "empty_share", pair, "share"))
    told = tuple(change for change in changes if change.before is not None or change.after is not None)
    return Comparison((before["verdict"]["title"], after["verdict"]["title"]), told)


def _change(what: str, field: str, pair: tuple[Json, Json], unit: str) -> Change:
    return Change(what, pair[0].get(field), pair[1].get(field), unit)
