"""HX104: a model is sized by the tokenizer's vocab_size.

What it checks
    tokenizer.vocab_size as an argument of resize_token_embeddings (an error), as the size of an Embedding or Linear
    layer, as vocab_size= or num_embeddings= of a call, or assigned to a config's vocab_size.
Why it matters
    vocab_size leaves added tokens out: <|im_start|> and the like get ids beyond the last row.
Fix
    Use len(tokenizer), padded to a multiple of 64 where speed matters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source
from helixctl.doctor.tokenizing import is_tokenizer, looks_like_tokenizer

LEVEL = "warning"
MARKERS = ((b".vocab_size", b"okeni"), b"tok.vocab_size")
_LAYERS = ("torch.nn.Embedding", "torch.nn.Linear", "torch.nn.EmbeddingBag")


def check(source: Source) -> Iterator[Hit]:
    """Uses of the attribute as a size."""
    for node in source.index.nodes(ast.Attribute):
        if node.attr != "vocab_size" or not isinstance(node.ctx, ast.Load):
            continue
        if is_tokenizer(source, node.value) or looks_like_tokenizer(node.value):
            use = _use(source, node)
            if use is not None:
                level = "error" if use == "resize_token_embeddings" else None
                message = f"{ast.unparse(node)} leaves added tokens out, and sizes {use}"
                yield Hit(node, message, "error" if level else None)


def _use(source: Source, node: ast.Attribute) -> str | None:
    """What the size is for."""
    parent = source.index.parents.get(node)
    if isinstance(parent, ast.Assign):
        target = parent.targets[0]
        names_size = isinstance(target, ast.Attribute) and target.attr == "vocab_size"
        of_config = names_size and "config" in ast.unparse(target)
        return "the model's config" if of_config else None
    if isinstance(parent, ast.keyword):
        call = source.index.parents.get(parent)
        if parent.arg not in ("vocab_size", "num_embeddings", "new_num_tokens") or not isinstance(call, ast.Call):
            return None
        return getattr(call.func, "attr", None) or getattr(call.func, "id", None) or "a model"
    if isinstance(parent, ast.Call) and node in parent.args:
        name = getattr(parent.func, "attr", None) or getattr(parent.func, "id", "")
        if name == "resize_token_embeddings" or source.names.qualified(parent.func) in _LAYERS:
            return str(name)
    return None
