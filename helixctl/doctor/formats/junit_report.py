"""JUnit XML: a suite per file, a failed case per finding, one passed case where there is none."""

from __future__ import annotations

import re
from itertools import groupby
from xml.sax.saxutils import escape, quoteattr

from helixctl.doctor.finding import Finding
from helixctl.doctor.listing import Report

_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def format_report(report: Report) -> str:
    """XML text."""
    total = max(len(report.findings), 1)
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<testsuites name="helixctl doctor" tests="{total}" failures="{len(report.findings)}">',
    ]
    for path, group in groupby(report.findings, key=lambda finding: finding.path):
        found = list(group)
        name = _attribute(path)
        lines.append(f'  <testsuite name={name} tests="{len(found)}" failures="{len(found)}">')
        lines += [line for finding in found for line in _case(finding)]
        lines.append("  </testsuite>")
    if not report.findings:
        lines.append('  <testsuite name="helixctl doctor" tests="1" failures="0">')
        lines.append('    <testcase name="no findings" classname="helixctl.doctor" />')
        lines.append("  </testsuite>")
    return "\n".join([*lines, "</testsuites>"]) + "\n"


def _case(finding: Finding) -> list[str]:
    name = _attribute(f"helixctl.{finding.code}")
    text = escape(_NOT_XML.sub("?", f"{finding.where}\n{finding.text}\nfix: {finding.fix}"))
    place = f'line="{finding.line}" column="{finding.column}"'
    return [
        f"    <testcase name={name} classname={_attribute(finding.path)} {place}>",
        f'      <failure type="{finding.level}" message={_attribute(finding.message)}>{text}</failure>',
        "    </testcase>",
    ]


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("?", text))
