"""HX030: a worker thread swallows its exceptions.

What it checks
    In a function that runs in a thread, or that such a function calls: a loop with `except Exception` (or a bare
    except) that does nothing (an error; a warning where a comment says why) or only logs (a warning). Handlers around
    clean-up calls alone are left out.
Why it matters
    The thread goes on as if nothing had happened, or stops feeding the others; the run stalls or trains on less data,
    and nobody is told.
Fix
    Keep the exception, stop the others, and raise it in the main thread.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit, Level
from helixctl.doctor.flow import called_functions, own_nodes, thread_targets
from helixctl.doctor.index import Function
from helixctl.doctor.source import Source

LEVEL = "error"
MARKERS = (b"threading", b"ThreadPool")
_BROAD = ("Exception", "BaseException")
_LOG_METHODS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "log", "print", "print_exc"}
_CLEANUP = {
    "close", "shutdown", "unlink", "join", "kill", "terminate", "cancel", "remove", "flush", "disconnect", "stop",
    "release", "rmtree", "put_nowait",
}  # fmt: skip


def check(source: Source) -> Iterator[Hit]:
    """Handlers in thread functions."""
    loops: dict[Function, tuple[type[ast.AST], ...]] = {}
    for _, target in thread_targets(source):
        for called in called_functions(source, target):
            loops.setdefault(called, (ast.While,))
        loops[target] = (ast.While, ast.For)
    for function, kinds in loops.items():
        for node in own_nodes(function):
            if isinstance(node, ast.Try) and _is_main_loop(source, node, function, kinds) and not _cleans_up(node):
                yield from _handlers(source, node)


def _handlers(source: Source, node: ast.Try) -> Iterator[Hit]:
    for handler in node.handlers:
        if not _is_broad(handler):
            continue
        if all(isinstance(statement, ast.Pass | ast.Continue) or _is_literal(statement) for statement in handler.body):
            explained = any("#" in line for line in source.lines[handler.lineno - 1 : handler.end_lineno])
            level: Level = "warning" if explained else "error"
            yield Hit(handler, "this worker thread swallows every exception and goes on", level)
        elif all(isinstance(s, ast.Pass | ast.Continue) or _is_literal(s) or _logs(s) for s in handler.body):
            yield Hit(handler, "this worker thread only logs exceptions and goes on", "warning")


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in _BROAD) for kind in kinds)


def _is_literal(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _logs(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and _called_name(statement.value) in _LOG_METHODS


def _called_name(node: ast.expr) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "attr", None) or getattr(node.func, "id", None)


def _is_main_loop(source: Source, node: ast.AST, function: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    """The statement is in one loop of the function, not in loops within it, and not itself part of a clean-up."""
    loops: list[ast.AST] = []
    for parent in source.index.ancestors(node):
        if parent is function:
            break
        if isinstance(parent, ast.ExceptHandler):
            return False
        if isinstance(parent, ast.While | ast.For):
            loops.append(parent)
    return len(loops) == 1 and isinstance(loops[0], kinds)


def _cleans_up(node: ast.Try) -> bool:
    """All that the guarded block calls is clean-up."""
    names = [
        _called_name(part) for statement in node.body for part in ast.walk(statement) if isinstance(part, ast.Call)
    ]
    return bool(names) and all(name in _CLEANUP | _LOG_METHODS for name in names)
