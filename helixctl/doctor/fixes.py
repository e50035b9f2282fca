"""Changes to a file that mend a finding without risk: what rules propose, and how it is applied."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from helixctl.doctor.finding import Edit, Finding
from helixctl.doctor.source import Source, decode, place


def remove_keyword(source: Source, call: ast.Call, name: str) -> tuple[Edit, ...]:
    """Take the keyword argument `name` out of a call, with the comma in front of it."""
    for number, keyword in enumerate(call.keywords):
        if keyword.arg != name:
            continue
        before: list[ast.expr | ast.keyword] = sorted([*call.args, *call.keywords[:number]], key=place)
        if not before:
            return ()
        return (_between(source, before[-1], keyword),)
    return ()


def insert_argument(source: Source, call: ast.Call, text: str) -> tuple[Edit, ...]:
    """Add an argument behind the last one of a call."""
    arguments: list[ast.expr | ast.keyword] = sorted([*call.args, *call.keywords], key=place)
    if not arguments:
        return ()
    last = arguments[-1]
    line, column = _end(source, last)
    return (Edit(line, column, line, column, f", {text}"),)


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits; of edits that overlap the first wins."""
    lines = text.split("\n")
    end_of_previous = (len(lines) + 1, 0)
    for edit in sorted(set(edits), key=lambda e: (e.line, e.column), reverse=True):
        if (edit.end_line, edit.end_column) > end_of_previous:
            continue
        head = lines[edit.line - 1][: edit.column - 1]
        tail = lines[edit.end_line - 1][edit.end_column - 1 :]
        lines[edit.line - 1 : edit.end_line] = (head + edit.text + tail).split("\n")
        end_of_previous = (edit.line, edit.column)
    return "\n".join(lines)


def fix_files(findings: Iterable[Finding], root: Path) -> int:
    """Apply the edits of all findings to their files; returns how many findings had one.

    A file whose mended text is no Python any more is left as it is.
    """
    by_path: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.edits:
            by_path.setdefault(finding.path, []).append(finding)
    count = 0
    for relative, found in by_path.items():
        path = root / relative
        content = path.read_bytes()
        newline = "\r\n" if b"\r\n" in content else "\n"
        text = apply_edits(decode(content), (edit for finding in found for edit in finding.edits))
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        path.write_bytes(text.replace("\n", newline).encode("utf-8"))
        count += len(found)
    return count


def _between(source: Source, before: ast.AST, keyword: ast.AST) -> Edit:
    """Delete from the end of `before` to the end of `keyword`."""
    line, column = _end(source, before)
    end_line, end_column = _end(source, keyword)
    return Edit(line, column, end_line, end_column, "")


def _end(source: Source, node: ast.AST) -> tuple[int, int]:
    line = getattr(node, "end_lineno", 1)
    offset = getattr(node, "end_col_offset", 0)
    return line, len(source.lines[line - 1].encode()[:offset].decode(errors="replace")) + 1
