"""HX014: options of workers for a DataLoader that has none.

What it checks
    multiprocessing_context, persistent_workers, prefetch_factor or timeout on a DataLoader with num_workers=0
    (written out or left out).
Why it matters
    torch raises ValueError for each of them.
Fix
    Remove the option, or write multiprocessing_context="spawn" if num_workers > 0 else None. `--fix` removes it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.cuda import DATALOADER, LOADER_POSITIONS
from helixctl.doctor.finding import Hit
from helixctl.doctor.fixes import remove_keyword
from helixctl.doctor.names import UNKNOWN_VALUE, Called
from helixctl.doctor.source import Source

LEVEL = "error"
MARKERS = (b"DataLoader",)
_OPTIONS = ("multiprocessing_context", "persistent_workers", "prefetch_factor", "timeout")


def check(source: Source) -> Iterator[Hit]:
    """Loaders without workers."""
    for call in source.calls_of(DATALOADER):
        workers = call.argument("num_workers", LOADER_POSITIONS["num_workers"])
        none = source.names.constant(workers) == 0 if workers is not None else not call.open
        for option in _OPTIONS if none else ():
            if _is_set(source, call, option):
                edits = remove_keyword(source, call.node, option)
                yield Hit(call.node, f"{option} is set, but there are no workers: torch raises ValueError", None, edits)


def _is_set(source: Source, call: Called, option: str) -> bool:
    node = call.argument(option)
    if node is None:
        return False
    value = source.names.constant(node)
    if value is not UNKNOWN_VALUE:
        return bool(value)
    name = source.names.qualified(source.names.value(node)) if isinstance(node, ast.expr) else None
    return name == "multiprocessing.get_context()"
