"""GitLab's code quality report."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

from helixctl.doctor.finding import Finding, Level
from helixctl.doctor.listing import Report

_SEVERITIES: dict[Level, str] = {"error": "major", "warning": "minor", "info": "info"}


def format_report(report: Report) -> str:
    """A JSON list; fingerprints are unique, and do not change when lines move."""
    seen: Counter[str] = Counter()
    entries = []
    for finding in report.findings:
        seen[finding.fingerprint] += 1
        entries.append(_entry(finding, seen[finding.fingerprint]))
    return json.dumps(entries, indent=2) + "\n"


def _entry(finding: Finding, ordinal: int) -> dict[str, Any]:
    fingerprint = hashlib.sha256(f"{finding.fingerprint}:{ordinal}".encode()).hexdigest()[:32]
    return {
        "check_name": finding.code,
        "description": f"{finding.code} {finding.message}",
        "severity": _SEVERITIES[finding.level],
        "fingerprint": fingerprint,
        "location": {
            "path": finding.path,
            "positions": {
                "begin": {"line": finding.line, "column": finding.column},
                "end": {"line": finding.end_line, "column": finding.end_column},
            },
        },
    }
