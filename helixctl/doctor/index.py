"""One walk over a syntax tree: parents, nodes by type, scopes and what their names are bound to."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar, cast

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*FUNCTIONS, ast.ClassDef)
_LEAVES = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)


@dataclass(frozen=True, eq=False)
class Bound:
    """What a name stands for: an imported path, an expression, a definition; all None where it cannot be known."""

    path: str | None = None
    value: ast.expr | None = None
    definition: Definition | None = None
    parameter: bool = False
    """`value` is the default of a parameter, so only one of its possible values."""


UNKNOWN = Bound()


@dataclass(eq=False)
class Scope:
    """A module, class or function, and its names."""

    node: ast.AST
    parent: Scope | None
    names: dict[str, list[Bound]] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    """Names declared global or nonlocal."""
    attributes: dict[str, list[Bound]] = field(default_factory=dict)
    """Of a class: what `self.name` was set to, in any method."""

    @property
    def is_class(self) -> bool:
        """Names of a class body are not seen by the functions in it."""
        return isinstance(self.node, ast.ClassDef)


class Index:
    """The tree of one file, ready for questions. `package` is the module's own, for relative imports."""

    def __init__(self, tree: ast.Module, package: tuple[str, ...] = ()) -> None:
        self.tree = tree
        self.package = package
        self.parents: dict[ast.AST, ast.AST] = {}
        self.star_imports: list[str] = []
        self._by_type: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self._scopes: dict[ast.AST, Scope] = {tree: Scope(tree, None)}
        self._walk()
        _Binder(self).bind()

    def nodes(self, kind: type[Node]) -> list[Node]:
        """All nodes of exactly this type, in no particular order."""
        return cast("list[Node]", self._by_type.get(kind, []))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All named functions."""
        yield from self.nodes(ast.FunctionDef)
        yield from self.nodes(ast.AsyncFunctionDef)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """From the parent outwards to the module."""
        current = self.parents.get(node)
        while current is not None:
            yield current
            current = self.parents.get(current)

    def scope_node(self, node: ast.AST) -> ast.AST:
        """The module, class or function in whose body `node` is evaluated.

        Decorators, defaults and annotations belong outside of the function that they stand at.
        """
        current = node
        for parent in self.ancestors(node):
            if isinstance(parent, ast.Lambda):
                if current is parent.body:
                    return parent
            elif isinstance(parent, _SCOPES) and isinstance(current, ast.stmt):
                return parent
            current = parent
        return self.tree

    def scope_of(self, node: ast.AST) -> Scope:
        """The scope in which `node` is evaluated."""
        return self.scope(self.scope_node(node))

    def scope(self, node: ast.AST) -> Scope:
        """The scope that `node` (a module, class or function) opens."""
        known = self._scopes.get(node)
        if known is None:
            known = self._scopes[node] = Scope(node, self.scope_of(node))
        return known

    def own_class(self, function: ast.AST) -> ast.ClassDef | None:
        """The class that `function` is a method of."""
        scope = self.scope(function) if isinstance(function, FUNCTIONS) else None
        node = scope.parent.node if scope and scope.parent else None
        return node if isinstance(node, ast.ClassDef) else None

    def method_around(self, node: ast.AST, name: str) -> ast.ClassDef | None:
        """The class whose instance is called `name` at `node`: `name` is the first parameter of a method around it."""
        for parent in self.ancestors(node):
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*parent.args.posonlyargs, *parent.args.args]
                owner = self.own_class(parent)
                if owner is not None:
                    return owner if arguments and arguments[0].arg == name else None
        return None

    def _walk(self) -> None:
        """Fill parents and nodes by type."""
        parents, by_type = self.parents, self._by_type
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            by_type[type(node)].append(node)
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    for child in value:
                        if isinstance(child, ast.AST):
                            parents[child] = node
                            stack.append(child)
                elif isinstance(value, ast.AST) and not isinstance(value, _LEAVES):
                    parents[value] = node
                    stack.append(value)


class _Binder:
    """Fills the names of all scopes."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def bind(self) -> None:
        """Look at everything that gives a name a meaning."""
        index = self._index
        declarations: list[ast.Global | ast.Nonlocal] = [*index.nodes(ast.Global), *index.nodes(ast.Nonlocal)]
        for declaration in declarations:
            index.scope_of(declaration).outside.update(declaration.names)
        self._imports()
        for definition in [*index.functions(), *index.nodes(ast.ClassDef)]:
            self._add(definition, definition.name, Bound(definition=definition))
        for function in [*index.functions(), *index.nodes(ast.Lambda)]:
            self._parameters(function)
        for name in index.nodes(ast.Name):
            if not isinstance(name.ctx, ast.Load):
                self._add(name, name.id, self._meaning(name))
        for handler in index.nodes(ast.ExceptHandler):
            if handler.name:
                self._add(handler, handler.name, UNKNOWN)
        self._attributes()

    def _attributes(self) -> None:
        """`self.name = value` in methods."""
        for attribute in self._index.nodes(ast.Attribute):
            if isinstance(attribute.ctx, ast.Store) and isinstance(attribute.value, ast.Name):
                owner = self._index.method_around(attribute, attribute.value.id)
                if owner is not None:
                    bounds = self._index.scope(owner).attributes.setdefault(attribute.attr, [])
                    bounds.append(self._meaning(attribute))

    def _add(self, node: ast.AST, name: str, bound: Bound) -> None:
        scope = self._index.scope_of(node)
        if name in scope.outside:
            scope = self._index.scope(self._index.tree)
        scope.names.setdefault(name, []).append(bound)

    def _imports(self) -> None:
        for plain in self._index.nodes(ast.Import):
            for alias in plain.names:
                top = alias.name.split(".")[0]
                self._add(plain, alias.asname or top, Bound(path=alias.name if alias.asname else top))
        for node in self._index.nodes(ast.ImportFrom):
            base = self._absolute(node)
            for alias in node.names:
                if alias.name == "*":
                    self._index.star_imports.append(base)
                else:
                    self._add(node, alias.asname or alias.name, Bound(path=f"{base}.{alias.name}".lstrip(".")))

    def _absolute(self, node: ast.ImportFrom) -> str:
        """The module that a `from` import names, relative ones resolved."""
        if not node.level:
            return node.module or ""
        package = self._index.package
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def _parameters(self, function: Function) -> None:
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
        pairs = [*zip(positional, [*defaults, *arguments.defaults], strict=True)]
        pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        pairs += [(rest, None) for rest in (arguments.vararg, arguments.kwarg) if rest is not None]
        names = self._index.scope(function).names
        for argument, default in pairs:
            names.setdefault(argument.arg, []).append(Bound(value=default, parameter=True))

    def _meaning(self, target: ast.expr) -> Bound:
        """What an assignment target is set to."""
        parent = self._index.parents[target]
        if isinstance(parent, ast.Assign) or (isinstance(parent, ast.AnnAssign | ast.NamedExpr) and parent.value):
            return Bound(value=parent.value)
        if isinstance(parent, ast.withitem) and parent.optional_vars is target:
            return Bound(value=parent.context_expr)
        if isinstance(parent, ast.Tuple | ast.List):
            return self._unpacked(target, parent)
        return UNKNOWN

    def _unpacked(self, target: ast.expr, targets: ast.Tuple | ast.List) -> Bound:
        """`a, b = x, y`: the value beside the target."""
        assign = self._index.parents[targets]
        value = assign.value if isinstance(assign, ast.Assign) else None
        same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(targets.elts)
        if not same or any(isinstance(element, ast.Starred) for element in targets.elts):
            return UNKNOWN
        return Bound(value=cast("ast.Tuple", value).elts[targets.elts.index(target)])
