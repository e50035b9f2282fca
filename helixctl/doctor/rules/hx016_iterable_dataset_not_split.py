"""HX016: every worker of an IterableDataset yields everything.

What it checks
    A class derived from IterableDataset whose code mentions neither get_worker_info nor a worker, rank, shard or
    split.
Why it matters
    With several workers each of them runs __iter__ in full, so every document is trained on once per worker.
Fix
    Ask torch.utils.data.get_worker_info() in __iter__ and yield every n-th document.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"IterableDataset",)
_WORDS = ("worker", "rank", "shard", "split", "replica", "partition", "process")
_SOURCES = ("data", "loader", "iter", "source", "stream", "generator")


def check(source: Source) -> Iterator[Hit]:
    """Classes with an __iter__ of their own."""
    for owner in source.index.nodes(ast.ClassDef):
        if "torch.utils.data.IterableDataset" not in source.names.classes(owner):
            continue
        for statement in owner.body:
            is_own = isinstance(statement, ast.FunctionDef) and statement.name == "__iter__"
            if is_own and not _splits(owner) and not _wraps(statement):
                yield Hit(statement, f"{owner.name}.__iter__ yields the same documents in every worker")


def _splits(owner: ast.ClassDef) -> bool:
    words = (getattr(n, "id", None) or getattr(n, "attr", None) or getattr(n, "arg", None) for n in ast.walk(owner))
    return any(part in word.lower() for word in words if isinstance(word, str) for part in _WORDS)


def _wraps(method: ast.stmt) -> bool:
    """It goes over another dataset or loader, which may split."""
    iterated = [node.iter for node in ast.walk(method) if isinstance(node, ast.For | ast.comprehension)]
    calls = (node for node in ast.walk(method) if isinstance(node, ast.Call))
    iterated += [call.args[0] for call in calls if getattr(call.func, "id", "") == "iter" and call.args]
    names = [node.attr.lower() for part in iterated for node in ast.walk(part) if isinstance(node, ast.Attribute)]
    return any(word in name for word in _SOURCES for name in names)
