"""HX031: a daemon thread that nobody watches.

What it checks
    Thread(daemon=True) in a file that neither joins a thread, asks is_alive(), nor installs threading.excepthook.
Why it matters
    When it raises, a trace is printed, the main thread carries on, and the process exits with 0.
Fix
    Keep the thread, hand its exception to the main thread, and join it with a timeout.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"daemon",)


def check(source: Source) -> Iterator[Hit]:
    """Daemons, where nothing in the file looks after threads."""
    found = [
        call.node for call in source.calls_of("threading.Thread") if _is_daemon(source, call.keywords.get("daemon"))
    ]
    if found and not _watches(source):
        for node in found:
            yield Hit(node, "nobody joins this daemon thread or notices when it dies")


def _is_daemon(source: Source, node: ast.expr | None) -> bool:
    return node is not None and source.names.constant(node) is True


def _watches(source: Source) -> bool:
    for attribute in source.index.nodes(ast.Attribute):
        if attribute.attr in ("is_alive", "excepthook"):
            return True
        call = source.index.parents.get(attribute)
        if attribute.attr == "join" and isinstance(call, ast.Call) and call.func is attribute:
            timeout = not call.args or (
                isinstance(call.args[0], ast.Constant) and not isinstance(call.args[0].value, str)
            )
            if timeout and not isinstance(attribute.value, ast.Constant):
                return True
    return False
