"""HX018: a script that starts workers does things to the machine while it is imported.

What it checks
    mkdir, makedirs, rmtree, sys.exit, logging.basicConfig and open(..., "w") at module level of a script that also
    starts processes or DataLoader workers.
Why it matters
    Spawned workers import the script again: the folder is made again, the file is emptied again, the log is set up
    again.
Fix
    Move it into main(), called under `if __name__ == "__main__":`.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.cuda import loaders, process_starts
from helixctl.doctor.finding import Hit
from helixctl.doctor.names import Called
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"multiprocessing", b"DataLoader", b"ProcessPoolExecutor")
_EFFECTS = frozenset({"os.makedirs", "os.mkdir", "os.remove", "shutil.rmtree", "sys.exit", "logging.basicConfig"})


def check(source: Source) -> Iterator[Hit]:
    """Side effects at import, where workers are started."""
    if not source.is_script or source.is_notebook or source.is_test:
        return
    if next(iter(loaders(source)), None) is None and next(iter(process_starts(source)), None) is None:
        return
    for call in source.calls:
        if (call.name in _EFFECTS or _is_write(source, call)) and source.runs_at_import(call.node):
            yield Hit(call.node, f"{call.name}() runs again in every spawned worker")


def _is_write(source: Source, call: Called) -> bool:
    mode = source.names.constant(call.argument("mode", 1))
    return call.name == "open" and isinstance(mode, str) and "w" in mode
