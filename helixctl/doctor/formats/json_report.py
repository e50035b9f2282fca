"""For other programs: one object with a schema version, counts and all findings."""

from __future__ import annotations

import json

from helixctl.doctor.finding import LEVELS
from helixctl.doctor.listing import Report


def format_report(report: Report) -> str:
    """Indented JSON."""
    content = {
        "schema": 1,
        "tool": "helixctl doctor",
        "version": report.version,
        "files": report.num_files,
        "known": report.num_known,
        "counts": {level: report.count(level) for level in reversed(LEVELS)},
        "findings": [finding.to_json() for finding in report.findings],
    }
    return json.dumps(content, indent=2) + "\n"
