"""Suppressions in the code: `# helixctl: ignore[HX010] reason`, for its line or, alone on a line, for the next.

`# helixctl: ignore-file[HX010] reason` counts for the whole file. A statement over several lines is covered by a
suppression on any of its lines.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace

from helixctl.doctor.finding import Edit, Finding

_PATTERN = re.compile(r"#\s*helixctl:\s*ignore(?P<file>-file)?\s*(?:\[(?P<codes>[^\]]*)\])?[\s:-]*(?P<reason>.*)")
MARKER = b"helixctl:"
_OWN = ("HX900", "HX901", "HX902", "HX903")


@dataclass(frozen=True)
class Suppression:
    """One comment. `line` is where it stands, `covers` the line that it is about (0: the file)."""

    line: int
    column: int
    covers: int
    words: tuple[str, ...]
    reason: str
    start: int
    """Columns of the comment, with the spaces in front of it."""
    end: int


def read_suppressions(text: str) -> list[Suppression]:
    """All suppressions of a file; comments only, strings do not count."""
    if "helixctl:" not in text:
        return []
    lines = text.splitlines()
    found = []
    for line, column, comment in _comments(text):
        match = _PATTERN.search(comment)
        if match is None:
            continue
        words = tuple(word.strip() for word in (match["codes"] or "").split(",") if word.strip())
        alone = not lines[line - 1][:column].strip()
        covers = 0 if match["file"] else _next_code_line(lines, line) if alone else line
        start = len(lines[line - 1][: column + match.start()].rstrip()) + 1
        end = column + len(comment) + 1
        reason = match["reason"].strip()
        found.append(Suppression(line, column + match.start() + 1, covers, words, reason, start, end))
    return found


def apply(
    findings: list[Finding], suppressions: list[Suppression], known: dict[str, str], active: frozenset[str]
) -> list[Finding]:
    """Findings that no suppression covers, and findings about the suppressions.

    `known` maps codes and names to codes; only rules in `active` ran, so only their suppressions can be stale.
    """
    used: set[tuple[int, str]] = set()
    left = []
    for finding in findings:
        hits = [
            (number, word)
            for number, suppression in enumerate(suppressions)
            for word in suppression.words
            if known.get(word.lower()) == finding.code and finding.code not in _OWN and _covers(suppression, finding)
        ]
        used.update(hits)
        if not hits:
            left.append(finding)
    for number, suppression in enumerate(suppressions):
        unused = [word for word in suppression.words if (number, word) not in used]
        left += _judge(suppression, unused, known, active)
    return left


def _covers(suppression: Suppression, finding: Finding) -> bool:
    return suppression.covers == 0 or finding.line <= suppression.covers <= max(finding.end_line, finding.line)


def _judge(
    suppression: Suppression, unused: list[str], known: dict[str, str], active: frozenset[str]
) -> Iterator[Finding]:
    """What is wrong with a suppression."""
    base = Finding(
        "", "", "warning", "", suppression.line, suppression.column, suppression.line, suppression.column, ""
    )
    if not suppression.words:
        message = "a suppression must name its rules: # helixctl: ignore[HX010] reason"
        yield replace(base, code="HX901", message=message)
    for word in unused:
        code = known.get(word.lower())
        if code is None:
            yield replace(base, code="HX901", message=f"there is no rule {word!r}")
        elif code in active:
            message = f"{code} finds nothing here; the suppression is stale"
            yield replace(base, code="HX900", message=message, edits=_removal(suppression, unused))
    if suppression.words and not suppression.reason:
        yield replace(base, code="HX903", message=f"no reason given for ignoring {', '.join(suppression.words)}")


def _removal(suppression: Suppression, unused: list[str]) -> tuple[Edit, ...]:
    """Take the comment away, where nothing in it is used."""
    if len(unused) < len(suppression.words):
        return ()
    return (Edit(suppression.line, suppression.start, suppression.line, suppression.end, ""),)


def _comments(text: str) -> Iterator[tuple[int, int, str]]:
    """Line, column (from 0) and text of every comment."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.start[1], token.string
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return


def _next_code_line(lines: list[str], line: int) -> int:
    """The first line below that is neither empty nor a comment."""
    for number in range(line, len(lines)):
        stripped = lines[number].strip()
        if stripped and not stripped.startswith("#"):
            return number + 1
    return line
