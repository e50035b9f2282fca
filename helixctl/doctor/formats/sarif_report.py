"""SARIF 2.1.0, for GitHub code scanning and editors: one run, rules with their documentation."""

from __future__ import annotations

import json
from typing import Any

from helixctl.doctor.catalog import Rule, all_rules, sections_of
from helixctl.doctor.finding import Finding, Level
from helixctl.doctor.listing import Report

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS: dict[Level, str] = {"error": "error", "warning": "warning", "info": "note"}


def format_report(report: Report) -> str:
    """One log with one run."""
    codes = {finding.code for finding in report.findings}
    rules = [rule for rule in all_rules() if rule.code in codes]
    driver = {
        "name": "helixctl doctor",
        "version": report.version,
        "rules": [_rule(rule) for rule in rules],
    }
    index = {rule.code: number for number, rule in enumerate(rules)}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, index) for finding in report.findings],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    sections = sections_of(rule.documentation)
    return {
        "id": rule.code,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": sections.get("Why it matters", rule.title)},
        "help": {"text": rule.documentation},
        "defaultConfiguration": {"level": _LEVELS[rule.level]},
    }


def _result(finding: Finding, index: dict[str, int]) -> dict[str, Any]:
    region = {
        "startLine": finding.line,
        "startColumn": finding.column,
        "endLine": finding.end_line,
        "endColumn": finding.end_column,
    }
    cell = f"cell {finding.cell}: " if finding.cell is not None else ""
    uri = finding.path.replace("%", "%25").replace(" ", "%20").replace("#", "%23")
    return {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": _LEVELS[finding.level],
        "message": {"text": f"{cell}{finding.message}. {finding.fix}"},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}],
        "partialFingerprints": {"helixctlDoctor/v1": finding.fingerprint},
    }
