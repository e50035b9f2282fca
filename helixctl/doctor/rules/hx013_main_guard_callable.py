"""HX013: a worker is given a function that exists under the main guard only.

What it checks
    collate_fn, worker_init_fn, Process targets and pool functions defined under `if __name__ == "__main__":`. An
    error where the start method is spawn or forkserver, or Python 3.14 is the target; a warning elsewhere.
Why it matters
    A spawned child imports the script without what is under the guard: "Can't get attribute", and the parent only
    says that a worker exited unexpectedly.
Fix
    Move the function above the guard, to module level.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source
from helixctl.doctor.workers import worker_callables

LEVEL = "warning"
MARKERS = (b"__main__",)


def check(source: Source) -> Iterator[Hit]:
    """Callables from under the guard."""
    for given in worker_callables(source):
        definition = source.names.definition(given.node)
        if definition is None or isinstance(definition, ast.Lambda) or not source.is_guarded(definition):
            continue
        if isinstance(source.index.scope_node(definition), ast.Module):
            pickled = given.is_pickled(source.options.target_python)
            message = f"{given.role} is {definition.name}(), which only the main process defines"
            yield Hit(given.node, message, "error" if pickled else None)
