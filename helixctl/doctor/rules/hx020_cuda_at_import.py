"""HX020: CUDA is initialised while a module is imported.

What it checks
    Calls that create a CUDA context at module level, in a class body or in a decorator, also through a function of
    the same file. An error in packages, a warning in scripts; tests and notebooks are left out.
Why it matters
    Whoever imports the module can no longer fork, choose devices, or run without a GPU; every spawned worker pays for
    a context of its own.
Fix
    Ask in a function, on first use (functools.cache).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.cuda import cuda_flow, in_default, is_cuda_call
from helixctl.doctor.finding import Hit
from helixctl.doctor.flow import own_nodes
from helixctl.doctor.source import Source

LEVEL = "error"
MARKERS = (b"torch.cuda", b".cuda(", b'"cuda', b"'cuda", b"import cuda")


def check(source: Source) -> Iterator[Hit]:
    """Calls at import."""
    if source.is_test or source.is_notebook:
        return
    flow = None
    for node in source.index.nodes(ast.Call):
        if not source.runs_at_import(node) or in_default(source, node):
            continue
        level = "warning" if source.is_script else None
        if is_cuda_call(source, node):
            yield Hit(node, "this creates a CUDA context at import", "warning" if level else None)
            continue
        target = source.names.function(node.func)
        if target is None or _is_generator(target):
            continue
        flow = flow or cuda_flow(source)
        touch = flow.first(target)
        if touch is not None:
            message = f"this call at import touches CUDA in line {touch.lineno}"
            yield Hit(node, message, "warning" if level else None)


def _is_generator(function: ast.AST) -> bool:
    """Calling it runs nothing yet."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(function))
