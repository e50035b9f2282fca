"""HX034: a loop waits for a queue for ever.

What it checks
    q.get() without timeout in a loop, q being a queue of this file, where the item is not compared with a sentinel.
Why it matters
    When the producer dies the consumer waits for ever: no message, no exit, 0 % busy.
Fix
    Let the producer send a sentinel (None) when it ends, whatever the reason; or use get(timeout=...) and a stop
    event.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"Queue",)
_QUEUES = frozenset(
    f"{base}.get"
    for base in (
        "queue.Queue()", "queue.LifoQueue()", "queue.PriorityQueue()", "queue.SimpleQueue()", "multiprocessing.Queue()",
        "multiprocessing.JoinableQueue()", "multiprocessing.SimpleQueue()", "multiprocessing.get_context().Queue()",
    )
)  # fmt: skip


def check(source: Source) -> Iterator[Hit]:
    """Blocking gets in loops."""
    for call in source.calls:
        if call.name not in _QUEUES or call.open or call.argument("timeout", 1) is not None:
            continue
        if source.names.constant(call.argument("block", 0)) is False:
            continue
        loop = _loop_around(source, call.node)
        if loop is not None and not _has_sentinel(source, call.node, loop):
            yield Hit(call.node, "get() in a loop without a timeout or a sentinel waits for ever if the producer dies")


def _loop_around(source: Source, node: ast.AST) -> ast.While | None:
    for parent in source.index.ancestors(node):
        if isinstance(parent, ast.While):
            return parent
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.For):
            return None
    return None


def _has_sentinel(source: Source, call: ast.Call, loop: ast.While) -> bool:
    """The item is compared with something, or the loop does not depend on an item coming."""
    if not (isinstance(loop.test, ast.Constant) and loop.test.value):
        return True
    names = {name.id for name in _targets(source, call)}
    for node in ast.walk(loop):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(
                part is call or (isinstance(part, ast.Name) and part.id in names) for s in sides for part in ast.walk(s)
            ):
                return True
        tests = node.test if isinstance(node, ast.If | ast.IfExp | ast.While) else None
        if any(isinstance(part, ast.Name) and part.id in names for part in (ast.walk(tests) if tests else ())):
            return True
    return False


def _targets(source: Source, call: ast.Call) -> Iterator[ast.Name]:
    """Names that the item is given."""
    parent = source.index.parents.get(call)
    found = (
        parent.targets
        if isinstance(parent, ast.Assign)
        else [parent.target]
        if isinstance(parent, ast.NamedExpr)
        else []
    )
    for target in found:
        yield from (node for node in ast.walk(target) if isinstance(node, ast.Name))
