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
    named = {call.node: call.keywords for call in source.calls}
    for node in source.index.nodes(ast.Call):
        keywords = {k.arg: k.value for k in node.keywords if k.arg is not None} | named.get(node, {})
        trusted = source.names.constant(keywords.get("trust_remote_code")) is True
        if trusted and "revision" not in keywords:
            yield Hit(node, "trust_remote_code=True runs code from the model's repository")
