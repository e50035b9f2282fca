"""HX005: code of ours runs between fork and exec.

What it checks
    preexec_fn= in calls of subprocess, in files that import torch.
Why it matters
    The function runs in a forked copy of a process with many threads: any lock that one of them held stays locked.
Fix
    Use start_new_session=, process_group=, user=, cwd= or env=, or a small launcher program.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.cuda import is_none
from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"preexec_fn",)


def check(source: Source) -> Iterator[Hit]:
    """Calls with preexec_fn."""
    if "torch" not in source.imports:
        return
    for call in source.calls:
        function = call.keywords.get("preexec_fn")
        if call.name.startswith("subprocess.") and function is not None and not is_none(function):
            yield Hit(call.node, "preexec_fn runs Python in a forked copy of this process")
