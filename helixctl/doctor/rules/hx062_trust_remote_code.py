"""HX062: code from a model repository is run.

What it checks
    trust_remote_code=True written into a call; the module of the project's own tokenizer is left out.
Why it matters
    Whoever can push to that repository runs code here, in the next job that starts.
Fix
    Make it an option that is off, or pin revision= to a commit that somebody read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source
from helixctl.doctor.tokenizing import is_project_module

LEVEL = "warning"
MARKERS = (b"trust_remote_code",)


def check(source: Source) -> Iterator[Hit]:
    """Calls that switch it on."""
    if is_project_module(source):
        return
    for node in source.index.nodes(ast.Call):
        for keyword in node.keywords:
            trusted = keyword.arg == "trust_remote_code" and source.names.constant(keyword.value) is True
            pinned = any(other.arg == "revision" for other in node.keywords)
            if trusted and not pinned:
                yield Hit(node, "trust_remote_code=True runs code from the model's repository")
