"""HX106: chat markup is put together by hand.

What it checks
    <|im_start|>, <|start_header_id|>, <start_of_turn>, [INST] and the like in an f-string with values, in a
    concatenation, or in a text that format() fills in. Tests and Jinja templates are left out.
Why it matters
    The text soon differs from the tokenizer's own template, by a newline or a system message; the model is trained on
    a format that nobody serves.
Fix
    Use tokenizer.apply_chat_template.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"<|im_start|>", b"<|start_header_id|>", b"<start_of_turn>", b"[INST]", b"<|user|>", b"<|assistant|>")
_MARKUP = tuple(marker.decode() for marker in MARKERS)


def check(source: Source) -> Iterator[Hit]:
    """Strings that hold markup and get values."""
    if source.is_test:
        return
    seen: set[int] = set()
    for node in _built(source):
        if node.lineno not in seen:
            seen.add(node.lineno)
            yield Hit(node, "chat markup is put together by hand")


def _built(source: Source) -> Iterator[ast.expr]:
    for joined in source.index.nodes(ast.JoinedStr):
        values = [part for part in joined.values if isinstance(part, ast.FormattedValue)]
        if values and _has_markup(joined):
            yield joined
    for operation in source.index.nodes(ast.BinOp):
        is_outermost = not isinstance(source.index.parents.get(operation), ast.BinOp)
        fills = isinstance(operation.op, ast.Mod) and isinstance(operation.left, ast.Constant)
        if is_outermost and (isinstance(operation.op, ast.Add) or fills) and _has_markup(operation):
            yield operation
    for call in source.index.nodes(ast.Call):
        text = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "format" else None
        if text is not None and (call.args or call.keywords) and _has_markup(source.names.value(text)):
            yield call


def _has_markup(node: ast.AST) -> bool:
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return any(mark in text for mark in _MARKUP for text in texts) and not any("{%" in text for text in texts)
