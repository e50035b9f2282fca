"""One file as rules see it: text, syntax tree, names, calls. Read without importing anything of it."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath

from helixctl.doctor.index import FUNCTIONS, Index
from helixctl.doctor.names import Called, Names
from helixctl.doctor.notebook import read_notebook

_ENCODING_ERRORS = (UnicodeDecodeError, LookupError)


class Unparsable(Exception):
    """A file is no Python of this interpreter's version. `line` and `column` count from 1."""

    def __init__(self, message: str, line: int = 1, column: int = 1) -> None:
        super().__init__(message)
        self.message, self.line, self.column = message, line, column


@dataclass(frozen=True)
class RuleOptions:
    """What rules may be told; part of the cache key."""

    project_tokenizer: str | None = None
    """Dotted name of the tokenizer that the project requires."""
    target_python: tuple[int, int] | None = None
    """Oldest Python that the code runs on."""
    target_torch: tuple[int, int] | None = None
    """Oldest torch that the code runs on."""


class Source:
    """A parsed file. `places` maps lines of a notebook's joined text to its cells."""

    def __init__(self, path: str, text: str, options: RuleOptions, module: tuple[str, ...] = ()) -> None:
        self.path = path
        self.options = options
        self.is_notebook = path.endswith(".ipynb")
        self.places: tuple[tuple[int, int], ...] | None = None
        if self.is_notebook:
            text = self._join_cells(text)
        self.text = text
        self.lines = text.splitlines()
        self.tree = _parse(text)
        self.module = ".".join(part for part in module if part != "__init__")
        package = module if module and module[-1] == "__init__" else module[:-1]
        self._package = tuple(part for part in package if part != "__init__")

    def _join_cells(self, text: str) -> str:
        try:
            notebook = read_notebook(text)
        except ValueError as error:
            raise Unparsable(f"not a notebook: {error}") from error
        self.places = notebook.places
        return notebook.text

    @cached_property
    def index(self) -> Index:
        """Parents, scopes, nodes by type; made when the first rule asks."""
        return Index(self.tree, self._package)

    @cached_property
    def names(self) -> Names:
        """What names stand for."""
        return Names(self.index, self.module or "__main__")

    @cached_property
    def is_test(self) -> bool:
        """Tests: what their modules do at import harms nobody else."""
        return is_test_path(self.path)

    @cached_property
    def imports(self) -> frozenset[str]:
        """Top-level names of the packages that the file imports anywhere."""
        plain = (alias.name for node in self.index.nodes(ast.Import) for alias in node.names)
        found = (node.module or "" for node in self.index.nodes(ast.ImportFrom) if not node.level)
        own = self.module.split(".")[0] if self.module else ""
        return frozenset({name.split(".")[0] for name in [*plain, *found]} | ({own} if own else set()))

    @cached_property
    def is_script(self) -> bool:
        """Meant to be run rather than imported: a notebook, a shebang, or a file outside of any package."""
        return self.is_notebook or self.text.startswith("#!") or self.module.count(".") == 0

    @cached_property
    def calls(self) -> tuple[Called, ...]:
        """All calls of something with a name, in the order of the text."""
        found = (self.names.called(node) for node in self.index.nodes(ast.Call))
        return tuple(sorted((call for call in found if call), key=lambda call: place(call.node)))

    def calls_of(self, *names: str) -> Iterator[Called]:
        """Calls of these functions and classes, or of classes derived from them."""
        wanted = frozenset(names)
        return (call for call in self.calls if call.names & wanted)

    @cached_property
    def main_guards(self) -> tuple[ast.If, ...]:
        """`if __name__ == "__main__":`."""
        return tuple(node for node in self.index.nodes(ast.If) if is_main_guard(node.test))

    def is_guarded(self, node: ast.AST) -> bool:
        """Under `if __name__ == "__main__":` or `if TYPE_CHECKING:`, so not run by an import."""
        current = node
        for parent in self.index.ancestors(node):
            test = parent.test if isinstance(parent, ast.If) and current in parent.body else None
            if test is not None and (is_main_guard(test) or "TYPE_CHECKING" in ast.dump(test)):
                return True
            current = parent
        return False

    def runs_at_import(self, node: ast.AST) -> bool:
        """In the module's body or a class body, a default or a decorator, and not under a guard."""
        scope = self.index.scope_node(node)
        while isinstance(scope, ast.ClassDef):
            scope = self.index.scope_node(scope)
        return isinstance(scope, ast.Module) and not self.is_guarded(node) and not self._is_lazy(node)

    def _is_lazy(self, node: ast.AST) -> bool:
        """An annotation under `from __future__ import annotations` and the like is never evaluated."""
        current = node
        for parent in self.index.ancestors(node):
            if isinstance(parent, ast.arg | ast.AnnAssign) and parent.annotation is current:
                return True
            if isinstance(parent, FUNCTIONS) and not isinstance(parent, ast.Lambda) and parent.returns is current:
                return True
            current = parent
        return False


def place(node: ast.AST) -> tuple[int, int]:
    """Line and column of a node; sorts nodes as they stand in the text."""
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))


def is_main_guard(test: ast.expr) -> bool:
    """`__name__ == "__main__"`, alone or with `and`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(is_main_guard(value) for value in test.values)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = [test.left, *test.comparators]
    named = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    return named and any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)


def is_test_path(path: str) -> bool:
    """In a folder of tests, or named as one."""
    parts = PurePath(path).parts
    name = parts[-1] if parts else ""
    in_folder = any(part in ("test", "tests", "testing") for part in parts[:-1])
    return in_folder or name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"


def module_of(path: Path) -> tuple[str, ...]:
    """The parts of a file's dotted module name, by the `__init__.py` files above it."""
    parts = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.name:
        parts.insert(0, folder.name)
        folder = folder.parent
    return tuple(parts)


def decode(content: bytes) -> str:
    """Text of a Python file; its coding line is obeyed.

    Raises:
        Unparsable: it is not text.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        import io
        import tokenize

        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except (*_ENCODING_ERRORS, SyntaxError) as error:
            raise Unparsable(f"not text: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parse(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like: not our subject
            return ast.parse(text)
    except SyntaxError as error:
        raise Unparsable(f"cannot be parsed: {error.msg}", error.lineno or 1, max(error.offset or 1, 1)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unparsable(f"cannot be parsed: {error}") from error
