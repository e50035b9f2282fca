"""For people: one line per finding, the remedy below it once per rule, a summary at the end."""

from __future__ import annotations

from helixctl.doctor.listing import Report


def format_report(report: Report) -> str:
    """Text of 100 columns or so; long messages are not cut."""
    lines = []
    told: set[str] = set()
    for finding in report.findings:
        lines.append(f"{finding.where}: {finding.level} {finding.code} {finding.message} ({finding.name})")
        if finding.text:
            lines.append(f"    {finding.text[:110]}")
        if finding.code not in told:
            told.add(finding.code)
            lines.append(f"    fix: {finding.fix}")
    fixable = sum(bool(finding.edits) for finding in report.findings)
    lines.append(report.summary)
    if fixable:
        lines.append(f"{fixable} can be mended with --fix")
    if report.findings:
        lines.append(f"more about a rule: helixctl doctor --explain {report.findings[0].code}")
    return "\n".join(lines) + "\n"
