"""HX050: a fast tokenizer is used, then the process forks.

What it checks
    A tokenizer from transformers is called before DataLoader workers of the default or fork method are started, in
    the same function or its callers, in a file that does not mention TOKENIZERS_PARALLELISM.
Why it matters
    The tokenizers library notices the fork, warns, and runs single-threaded in the workers from then on.
Fix
    Set TOKENIZERS_PARALLELISM=false, or start the workers with multiprocessing_context="spawn".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.cuda import loader_context, loaders
from helixctl.doctor.finding import Hit
from helixctl.doctor.flow import Flow
from helixctl.doctor.source import Source
from helixctl.doctor.tokenizing import is_tokenizer, looks_like_tokenizer

LEVEL = "warning"
MARKERS = (b"DataLoader",)


def check(source: Source) -> Iterator[Hit]:
    """Loaders behind a use of a tokenizer."""
    if "transformers" not in source.imports or "TOKENIZERS_PARALLELISM" in source.text:
        return
    flow = Flow(source, lambda call: _uses(source, call))
    for call, _ in loaders(source):
        use = flow.before(call.node) if loader_context(source, call) in (None, "fork") else None
        if use is not None:
            yield Hit(call.node, f"workers are forked after a tokenizer was used in line {use.lineno}")


def _uses(source: Source, call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in ("encode", "batch_encode_plus", "encode_plus"):
        function = function.value
    return is_tokenizer(source, function) or looks_like_tokenizer(function)
