"""What names and expressions stand for: qualified names through imports, aliases, partial() and base classes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from helixctl.doctor.index import Bound, Definition, Function, Index, Scope

_DEPTH = 8
_RENAMED = (
    (re.compile(r"^torch\.multiprocessing\b|^multiprocess\b|^pathos\.multiprocessing\b"), "multiprocessing"),
    (re.compile(r"^multiprocessing\.(?:context|process)\.(?=[A-Z])"), "multiprocessing."),
    (re.compile(r"^multiprocessing\.pool\.Pool$"), "multiprocessing.Pool"),
    (re.compile(r"^concurrent\.futures\.(?:process|thread|_base)\."), "concurrent.futures."),
    (re.compile(r"^torch\.utils\.data\.(?:[a-z_]+\.)+(?=[A-Z])"), "torch.utils.data."),
    (re.compile(r"^torchdata\.stateful_dataloader\.(?:[a-z_]+\.)*StatefulDataLoader"), "torch.utils.data.DataLoader"),
    (re.compile(r"^torch\.serialization\.load$"), "torch.load"),
    (re.compile(r"^transformers\.(?:[a-z_0-9]+\.)+(?=[A-Z]|pipeline\b)"), "transformers."),
    (re.compile(r"^tokenizers\.(?:[a-z_0-9]+\.)+(?=[A-Z])"), "tokenizers."),
    (re.compile(r"^(?:builtins)\."), ""),
)
_BUILTINS = frozenset({"open", "getattr", "super", "print", "exec", "eval", "dict", "len", "iter", "list", "map"})


@lru_cache(maxsize=4096)
def canonical(name: str) -> str:
    """One name for what libraries export under several."""
    for pattern, new in _RENAMED:
        name = pattern.sub(new, name)
    return name


class _Unknown:
    """The value of an expression that is not a constant."""

    def __bool__(self) -> bool:
        raise TypeError("compare with `is UNKNOWN_VALUE`")


UNKNOWN_VALUE = _Unknown()


@dataclass(frozen=True, eq=False)
class Called:
    """A call, with what `partial` and literal `**options` add to it."""

    node: ast.Call
    name: str
    """Qualified name of what is called."""
    names: frozenset[str]
    """`name` and the names of its base classes."""
    args: tuple[ast.expr, ...]
    keywords: dict[str, ast.expr] = field(default_factory=dict)
    open: bool = False
    """There may be more arguments than can be seen: `*args` or `**options`."""

    def argument(self, name: str, position: int | None = None) -> ast.expr | None:
        """The argument `name`, or that at `position`."""
        if name in self.keywords:
            return self.keywords[name]
        return self.args[position] if position is not None and position < len(self.args) else None


class Names:
    """Answers questions about the names of one file."""

    def __init__(self, index: Index, module: str) -> None:
        self._index = index
        self._module = module
        self._known: dict[ast.AST, str | None] = {}
        self._uses: dict[str, list[ast.Name]] | None = None

    def qualified(self, node: ast.expr | None) -> str | None:
        """The dotted name of what an expression stands for; a call's result ends with `()`."""
        if node is None or not isinstance(node, ast.Name | ast.Attribute | ast.Call):
            return None
        if node not in self._known:
            self._known[node] = None  # for names that are defined by themselves
            found = self._look(node)
            self._known[node] = canonical(found) if found else None
        return self._known[node]

    def bounds(self, node: ast.expr) -> list[Bound]:
        """Everything that a name or `self.attribute` was set to in this file."""
        if isinstance(node, ast.Name):
            return self._lookup(node.id, self._index.scope_of(node))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self._index.method_around(node, node.value.id)
            return self._attribute(owner, node.attr, _DEPTH) if owner is not None else []
        return []

    def value(self, node: ast.expr) -> ast.expr:
        """The expression that a name was set to, once and for all; the node itself otherwise."""
        for _ in range(_DEPTH):
            bounds = self.bounds(node)
            if len(bounds) != 1 or bounds[0].value is None or bounds[0].parameter:
                return node
            node = bounds[0].value
        return node

    def constant(self, node: ast.expr | None) -> object:
        """The constant that an expression always is, or `UNKNOWN_VALUE`."""
        if node is None:
            return UNKNOWN_VALUE
        node = self.value(node)
        try:
            return ast.literal_eval(node) if not isinstance(node, ast.Name | ast.Attribute) else UNKNOWN_VALUE
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return UNKNOWN_VALUE

    def strings(self, node: ast.expr | None, depth: int = 3) -> Iterator[str]:
        """String constants that an expression is made of, through the names in it."""
        for part in ast.walk(node) if node is not None else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value
            elif isinstance(part, ast.Name | ast.Attribute) and depth:
                for bound in self.bounds(part):
                    yield from self.strings(bound.value, depth - 1)

    def definition(self, node: ast.expr | None, depth: int = _DEPTH) -> Definition | ast.Lambda | None:
        """The function, lambda or class of this file that an expression names; through partial()."""
        if node is None or depth == 0 or isinstance(node, ast.Lambda):
            return node if isinstance(node, ast.Lambda) else None
        if isinstance(node, ast.Call):
            is_partial = self.qualified(node.func) in ("functools.partial", "functools.partialmethod")
            return self.definition(node.args[0], depth - 1) if is_partial and node.args else None
        for bound in self.bounds(node):
            found = bound.definition or (None if bound.parameter else self.definition(bound.value, depth - 1))
            if found is not None:
                return found
        return None

    def function(self, node: ast.expr | None) -> Function | None:
        """As `definition`, a class standing for its `__init__`, an instance for its `__call__`."""
        found = self.definition(node)
        if isinstance(found, ast.ClassDef):
            return self.method(found, "__init__")
        if found is None and node is not None:
            value = self.value(node)
            made = self.definition(value.func) if isinstance(value, ast.Call) else None
            return self.method(made, "__call__") if isinstance(made, ast.ClassDef) else None
        return found

    def method(self, owner: ast.ClassDef, name: str, depth: int = _DEPTH) -> Function | None:
        """A method of a class or of its bases in this file."""
        for bound in self._attribute(owner, name, depth):
            if isinstance(bound.definition, ast.FunctionDef | ast.AsyncFunctionDef):
                return bound.definition
        return None

    def classes(self, node: ast.expr | Definition | None, depth: int = _DEPTH) -> frozenset[str]:
        """The qualified name of a class and those of its bases, as far as this file tells."""
        if depth == 0 or node is None:
            return frozenset()
        if isinstance(node, ast.ClassDef):
            inherited = (self.classes(base, depth - 1) for base in node.bases)
            return frozenset({canonical(f"{self._module}.{node.name}")}).union(*inherited)
        if not isinstance(node, ast.expr):
            return frozenset()
        target = node.value if isinstance(node, ast.Subscript) else node
        name = self.qualified(target)
        local = self.definition(target, depth - 1)
        inherited_names = self.classes(local, depth - 1) if isinstance(local, ast.ClassDef) else frozenset()
        return inherited_names | ({name} if name else frozenset())

    def called(self, node: ast.Call) -> Called | None:
        """What a call calls; None where that has no name."""
        target: ast.expr = node.func
        args, keywords, opened = self._arguments(node)
        for _ in range(_DEPTH):
            value = self.value(target)
            if not (isinstance(value, ast.Call) and self.qualified(value.func) == "functools.partial" and value.args):
                break
            first, preset, more = self._arguments(value)
            target, args = first[0], [*first[1:], *args]
            keywords, opened = {**preset, **keywords}, opened or more
        name = self.qualified(target)
        if name is None:
            return None
        name = name.removesuffix(".__init__")  # super().__init__(...) takes the arguments of the base class
        return Called(node, name, self._names(name, target), tuple(args), keywords, opened)

    def _names(self, name: str, target: ast.expr) -> frozenset[str]:
        """`name`, and the names of base classes where the class does not choose the arguments itself."""
        local = self.definition(target)
        if not isinstance(local, ast.ClassDef) or any(
            getattr(statement, "name", None) == "__init__" for statement in local.body
        ):
            return frozenset({name})
        return self.classes(local) | {name}

    def _arguments(self, node: ast.Call) -> tuple[list[ast.expr], dict[str, ast.expr], bool]:
        """Positional and keyword arguments, and whether there may be more."""
        args = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        opened = len(args) != len(node.args)
        keywords: dict[str, ast.expr] = {}
        for keyword in node.keywords:
            if keyword.arg is not None:
                keywords[keyword.arg] = keyword.value
                continue
            options = self._options(keyword.value)
            opened = opened or options is None
            keywords |= options or {}
        return args, keywords, opened

    def _options(self, node: ast.expr) -> dict[str, ast.expr] | None:
        """The keywords of a dictionary that is written out; None where it is not."""
        value = self.value(node)
        pairs: dict[str, ast.expr] = {}
        if isinstance(value, ast.Call) and self.qualified(value.func) == "dict" and not value.args:
            pairs = {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg is not None}
            known = len(pairs) == len(value.keywords)
        elif isinstance(value, ast.Dict):
            keys = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            known = len(keys) == len(value.values)
            pairs = dict(zip(keys, value.values, strict=True)) if known else {}
        else:
            return None
        later = self._set_later(node) if known else None
        return None if later is None else pairs | later

    def _set_later(self, node: ast.expr) -> dict[str, ast.expr] | None:
        """What `options["key"] = value` adds anywhere in the file; None where more may happen to the dictionary."""
        added: dict[str, ast.expr] = {}
        for use in self._loads(node.id) if isinstance(node, ast.Name) else ():
            parent = self._index.parents.get(use)
            if isinstance(parent, ast.keyword) and parent.arg is None:
                continue
            if not isinstance(parent, ast.Subscript) or not isinstance(parent.slice, ast.Constant):
                return None
            assign = self._index.parents.get(parent)
            if isinstance(assign, ast.Assign) and parent in assign.targets:
                added[str(parent.slice.value)] = assign.value
            elif not isinstance(parent.ctx, ast.Load):
                return None
        return added

    def _loads(self, name: str) -> list[ast.Name]:
        """Uses of a name anywhere in the file."""
        if self._uses is None:
            self._uses = {}
            for node in self._index.nodes(ast.Name):
                if isinstance(node.ctx, ast.Load):
                    self._uses.setdefault(node.id, []).append(node)
        return self._uses.get(name, [])

    def _lookup(self, name: str, scope: Scope | None) -> list[Bound]:
        """Python's own search: this scope, then functions and the module around it."""
        first = scope
        while scope is not None:
            if name in scope.names and name not in scope.outside and (scope is first or not scope.is_class):
                return scope.names[name]
            scope = scope.parent
        return []

    def _attribute(self, owner: ast.ClassDef, name: str, depth: int) -> list[Bound]:
        """What `self.name` may be: set in a method, in the class body, or in a base class of this file."""
        scope = self._index.scope(owner)
        found = [*scope.attributes.get(name, ()), *scope.names.get(name, ())]
        for base in owner.bases if not found and depth else ():
            definition = self.definition(base, depth - 1)
            if isinstance(definition, ast.ClassDef):
                found = found or self._attribute(definition, name, depth - 1)
        return found

    def _look(self, node: ast.Name | ast.Attribute | ast.Call) -> str | None:
        if isinstance(node, ast.Call):
            return self._result(node)
        bounds = self.bounds(node)
        if bounds:
            return self._agreed(bounds)
        if isinstance(node, ast.Attribute):
            base = self.qualified(node.value)
            return f"{base}.{node.attr}" if base else None
        if node.id in _BUILTINS or not self._index.star_imports:
            return node.id if node.id in _BUILTINS else None
        return f"{self._index.star_imports[0]}.{node.id}"

    def _agreed(self, bounds: list[Bound]) -> str | None:
        """The one name that all meanings share; meanings such as None say nothing."""
        found: set[str] = set()
        for bound in bounds:
            if bound.path is not None:
                found.add(bound.path)
            elif bound.definition is not None:
                found.add(f"{self._module}.{bound.definition.name}")
            elif isinstance(bound.value, ast.Constant):
                continue
            else:
                found.add((None if bound.parameter else self.qualified(bound.value)) or "")
        return found.pop() if len({canonical(name) for name in found}) == 1 else None

    def _result(self, call: ast.Call) -> str | None:
        """The name of what a call returns."""
        name = self.qualified(call.func)
        if name == "super":
            return self._base(call)
        if name == "getattr" and len(call.args) > 1:
            attribute = call.args[1]
            base = self.qualified(call.args[0])
            constant = attribute.value if isinstance(attribute, ast.Constant) else None
            return f"{base}.{constant}" if base and isinstance(constant, str) else None
        if name in ("importlib.import_module", "__import__") and call.args:
            path = self.constant(call.args[0])
            return path if isinstance(path, str) else None
        if name == "functools.partial" and call.args:
            return self.qualified(call.args[0])
        return f"{name}()" if name else None

    def _base(self, call: ast.Call) -> str | None:
        """`super()`: the first base class, so that `super().__init__` is a call of it."""
        for parent in self._index.ancestors(call):
            if isinstance(parent, ast.ClassDef) and parent.bases:
                return self.qualified(parent.bases[0])
        return None
