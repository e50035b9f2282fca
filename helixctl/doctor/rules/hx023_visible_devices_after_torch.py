"""HX023: CUDA_VISIBLE_DEVICES is set after torch was imported.

What it checks
    os.environ["CUDA_VISIBLE_DEVICES"] = ..., setdefault, update or putenv below a module-level import of torch.
Why it matters
    It has an effect only until CUDA is initialised, and any import or is_available() in between may have done that.
Fix
    Set it before torch is imported, in the shell or in the env= of the child process.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source, place

LEVEL = "warning"
MARKERS = (b"CUDA_VISIBLE_DEVICES",)
_NAME = "CUDA_VISIBLE_DEVICES"


def check(source: Source) -> Iterator[Hit]:
    """Writes to the environment."""
    first = _torch_import(source)
    for node in _writes(source):
        if first is not None and first < place(node):
            yield Hit(node, f"{_NAME} is set after torch was imported in line {first[0]}")


def _torch_import(source: Source) -> tuple[int, int] | None:
    """The place of the first import of torch at module level."""
    lines = []
    for plain in source.index.nodes(ast.Import):
        if any(alias.name.split(".")[0] == "torch" for alias in plain.names) and source.runs_at_import(plain):
            lines.append(place(plain))
    for node in source.index.nodes(ast.ImportFrom):
        if (node.module or "").split(".")[0] == "torch" and not node.level and source.runs_at_import(node):
            lines.append(place(node))
    return min(lines, default=None)


def _writes(source: Source) -> Iterator[ast.expr | ast.stmt]:
    for assign in source.index.nodes(ast.Assign):
        for target in assign.targets:
            key = target.slice if isinstance(target, ast.Subscript) else None
            if key is not None and source.names.constant(key) == _NAME and _is_environment(source, target):
                yield assign
    for call in source.calls_of("os.environ.setdefault", "os.putenv"):
        if source.names.constant(call.argument("key", 0)) == _NAME:
            yield call.node
    for call in source.calls_of("os.environ.update"):
        if _NAME in call.keywords or any(_NAME in source.names.strings(argument) for argument in call.args):
            yield call.node


def _is_environment(source: Source, target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and source.names.qualified(target.value) == "os.environ"
