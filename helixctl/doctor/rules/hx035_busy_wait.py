"""HX035: a loop asks a queue again and again.

What it checks
    get_nowait() or get(block=False) in a while loop whose `except Empty` only continues, with nothing that waits.
Why it matters
    The loop holds the GIL half of the time and takes a core from the thread that it waits for.
Fix
    Use a blocking get, with a timeout.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"get_nowait", b"block=False")
_WAITS = {"sleep", "wait", "join", "select", "poll", "acquire"}


def check(source: Source) -> Iterator[Hit]:
    """Loops that spin."""
    for loop in source.index.nodes(ast.While):
        if any(_called(node) in _WAITS for node in ast.walk(loop)):
            continue
        for node in loop.body:
            if isinstance(node, ast.Try) and _polls(node) and any(_spins(source, handler) for handler in node.handlers):
                yield Hit(node, "this loop spins while the queue is empty")


def _polls(node: ast.Try) -> bool:
    for part in (part for statement in node.body for part in ast.walk(statement)):
        if _called(part) == "get_nowait":
            return True
        if _called(part) == "get" and isinstance(part, ast.Call) and any(_is_block_false(k) for k in part.keywords):
            return True
    return False


def _is_block_false(keyword: ast.keyword) -> bool:
    return keyword.arg == "block" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False


def _spins(source: Source, handler: ast.ExceptHandler) -> bool:
    is_empty = source.names.qualified(handler.type) in ("queue.Empty", "_queue.Empty")
    return is_empty and all(isinstance(statement, ast.Pass | ast.Continue) for statement in handler.body)


def _called(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "attr", None) or getattr(node.func, "id", None)
