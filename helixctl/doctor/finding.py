"""What rules say: a `Hit` at a node, and the `Finding` that a report holds. Lines and columns count from 1."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["error", "warning", "info"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error")


@dataclass(frozen=True)
class Edit:
    """Replace the text between two places of a file; columns count characters."""

    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True)
class Hit:
    """A rule found something at `node`. `level` None is the rule's own."""

    node: ast.expr | ast.stmt | ast.ExceptHandler | ast.arg | ast.keyword
    message: str
    level: Level | None = None
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One line of a report. In a notebook `line` counts within the cell, and cells count from 1."""

    code: str
    name: str
    level: Level
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    message: str
    fix: str = ""
    cell: int | None = None
    text: str = ""
    """The source line, stripped: part of the fingerprint, so that findings survive edits elsewhere in the file."""
    edits: tuple[Edit, ...] = ()

    @property
    def where(self) -> str:
        """`path:line:column`, with the cell of a notebook."""
        cell = f"cell {self.cell}:" if self.cell is not None else ""
        return f"{self.path}:{cell}{self.line}:{self.column}"

    @property
    def fingerprint(self) -> str:
        """The same for the same mistake wherever it moves in its file."""
        return hashlib.sha256(f"{self.code}\0{self.path}\0{self.text}".encode()).hexdigest()[:16]

    def sort_key(self) -> tuple[str, int, int, int, str]:
        """By place, then by code."""
        return (self.path, self.cell or 0, self.line, self.column, self.code)

    def to_json(self) -> dict[str, Any]:
        """Plain values, keys as in other linters' reports."""
        return {
            "code": self.code,
            "name": self.name,
            "level": self.level,
            "path": self.path,
            "cell": self.cell,
            "line": self.line,
            "column": self.column,
            "end_line": self.end_line,
            "end_column": self.end_column,
            "message": self.message,
            "fix": self.fix,
            "fixable": bool(self.edits),
            "fingerprint": self.fingerprint,
        }


def from_cache(values: dict[str, Any]) -> Finding:
    """A finding from the values that `dataclasses.asdict` made of it."""
    return Finding(**{**values, "edits": tuple(Edit(**edit) for edit in values["edits"])})
