"""In which order things happen, as far as one file tells: what came before a call, and which functions run in threads.

Looks through calls of the file's own functions, a few deep, and never guesses across files.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from helixctl.doctor.index import FUNCTIONS, Function
from helixctl.doctor.names import Called
from helixctl.doctor.source import Source, place

_DEPTH = 3
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)

Judge = Callable[[Called | ast.Call], bool]


class Flow:
    """Answers "did such a call run before this node?" for one kind of call."""

    def __init__(self, source: Source, is_event: Callable[[ast.Call], bool]) -> None:
        self._source = source
        self._is_event = is_event
        self._calls: dict[ast.AST, list[ast.Call]] = {}
        self._first: dict[ast.AST, ast.Call | None] = {}
        self._callers: dict[ast.AST, list[ast.Call]] = {}
        for node in sorted(source.index.nodes(ast.Call), key=place):
            self._calls.setdefault(source.index.scope_node(node), []).append(node)
            target = source.names.function(node.func)
            if target is not None:
                self._callers.setdefault(target, []).append(node)

    def before(self, node: ast.AST, depth: int = _DEPTH) -> ast.Call | None:
        """An event that has happened when `node` runs: earlier in its function, in `__init__`, or in its callers."""
        scope = self._source.index.scope_node(node)
        found = self._earlier(scope, node)
        if found is not None or depth == 0:
            return found
        found = self._in_constructor(scope)
        if found is not None:
            return found
        for call in self._callers.get(scope, ()):
            found = self.before(call, depth - 1)
            if found is not None:
                return found
        return None

    def first(self, function: ast.AST, depth: int = _DEPTH) -> ast.Call | None:
        """The first event in a function or in what it calls."""
        if function not in self._first:
            self._first[function] = None  # for functions that call themselves
            self._first[function] = self._search(self._calls.get(function, []), depth)
        return self._first[function]

    def _search(self, calls: list[ast.Call], depth: int) -> ast.Call | None:
        for call in calls:
            if self._is_event(call):
                return call
            target = self._source.names.function(call.func) if depth else None
            if target is not None and self.first(target, depth - 1) is not None:
                return call
        return None

    def _earlier(self, scope: ast.AST, node: ast.AST) -> ast.Call | None:
        inside = set(ast.walk(node))
        calls = [
            call
            for call in self._calls.get(scope, ())
            if place(call) < place(node) and call not in inside and not self._apart(call, node)
        ]
        return self._search(calls, _DEPTH)

    def _in_constructor(self, scope: ast.AST) -> ast.Call | None:
        """Methods run after the constructor of their class."""
        owner = self._source.index.own_class(scope)
        if owner is None or getattr(scope, "name", "") == "__init__":
            return None
        constructor = self._source.names.method(owner, "__init__")
        return self.first(constructor) if constructor is not None else None

    def _apart(self, first: ast.AST, second: ast.AST) -> bool:
        """In branches that exclude each other, or the first in a branch that leaves before the second."""
        index = self._source.index
        around = {second, *index.ancestors(second)}
        current = first
        for parent in index.ancestors(first):
            if isinstance(parent, ast.If) and current is not parent.test:
                branch = parent.body if current in parent.body else parent.orelse
                if parent in around and not any(statement in around for statement in branch):
                    other = parent.orelse if branch is parent.body else parent.body
                    return any(statement in around for statement in other)
                if parent not in around and isinstance(branch[-1], _ENDS):
                    return True
            if parent in around:
                return False
            current = parent
        return False


def thread_targets(source: Source) -> Iterator[tuple[ast.Call | ast.ClassDef, Function]]:
    """Functions that run in a thread, with what says so: Thread(target=), submit(), a Thread class with run()."""
    for call in source.calls:
        if call.names & {"threading.Thread", "threading.Timer"}:
            target = call.argument("target", 1) or call.argument("function", 1)
        elif call.name in _SUBMITS:
            target = call.argument("fn", 0)
        else:
            continue
        function = source.names.function(target)
        if function is not None:
            yield call.node, function
    for owner in source.index.nodes(ast.ClassDef):
        if "threading.Thread" in source.names.classes(owner):
            run = source.names.method(owner, "run")
            if run is not None:
                yield owner, run


_SUBMITS = frozenset(
    f"{pool}.{method}"
    for pool in ("concurrent.futures.ThreadPoolExecutor()", "multiprocessing.pool.ThreadPool()")
    for method in ("submit", "map", "apply_async", "imap", "imap_unordered")
)


def called_functions(source: Source, function: Function) -> Iterator[Function]:
    """Functions of this file that `function` calls directly."""
    for call in calls_in(source, function):
        target = source.names.function(call.func)
        if target is not None and target is not function:
            yield target


def calls_in(source: Source, function: ast.AST) -> Iterator[ast.Call]:
    """Calls in the body of `function`, those of functions defined in it left out."""
    for node in own_nodes(function):
        if isinstance(node, ast.Call):
            yield node


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Everything in a function's body, without the bodies of functions and classes defined in it."""
    body = function.body if hasattr(function, "body") else []
    stack = list(body) if isinstance(body, list) else [body]
    while stack:
        node = stack.pop(0)
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            stack[:0] = list(ast.iter_child_nodes(node))


def blocks_that_start_threads(source: Source, names: tuple[str, ...]) -> Iterator[tuple[ast.withitem, ast.Call]]:
    """`with` blocks of these context managers, with the first call in them that starts a thread."""
    starts = ("threading.Thread().start", *_SUBMITS)
    blocks: list[ast.With | ast.AsyncWith] = [*source.index.nodes(ast.With), *source.index.nodes(ast.AsyncWith)]
    for block in blocks:
        for item in block.items:
            value = item.context_expr
            if not isinstance(value, ast.Call) or source.names.qualified(value.func) not in names:
                continue
            nodes = (node for statement in block.body for node in ast.walk(statement) if isinstance(node, ast.Call))
            start = next((node for node in nodes if source.names.qualified(node.func) in starts), None)
            if start is not None:
                yield item, start
