"""HX040: torch.compile in a thread.

What it checks
    torch.compile in a function that runs in a thread, or that such a function calls.
Why it matters
    Compilation is not thread-safe: two threads that compile at the same time corrupt each other's guards or deadlock.
    Compiled code that has been warmed up may run anywhere. See https://github.com/pytorch/pytorch/issues/136833
Fix
    Compile and warm up in the main thread, or under one lock for the whole process, before the threads start.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.flow import called_functions, own_nodes, thread_targets
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = ((b"compile", b"hread"),)


def check(source: Source) -> Iterator[Hit]:
    """Calls in thread functions."""
    seen: set[ast.AST] = set()
    for _, target in thread_targets(source):
        for function in (target, *called_functions(source, target)):
            for node in own_nodes(function) if function not in seen else ():
                if isinstance(node, ast.Call) and source.names.qualified(node.func) == "torch.compile":
                    yield Hit(node, "torch.compile runs in a worker thread")
            seen.add(function)
