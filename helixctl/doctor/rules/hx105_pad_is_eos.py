"""HX105: pad is eos, and a mask is made by comparison with pad.

What it checks
    A file that sets pad_token to eos_token (or the ids) and also compares ids with pad_token_id to make a mask.
Why it matters
    The mask hides every real eos as well: the model never learns to stop.
Fix
    Make the mask from lengths, or use the tokenizer's attention_mask. Or give padding a token of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "error"
MARKERS = (b"pad_token",)
_CONDITIONS = (ast.If, ast.While, ast.Assert, ast.BoolOp)


def check(source: Source) -> Iterator[Hit]:
    """Comparisons, where the file makes pad and eos the same."""
    set_in = _same_in_line(source)
    if set_in is None:
        return
    for compare in source.index.nodes(ast.Compare):
        if isinstance(compare.ops[0], ast.Eq | ast.NotEq) and not _is_condition(source, compare):
            sides = [compare.left, *compare.comparators]
            if any(_is_pad(source, side) for side in sides) and not any(_is_scalar(side) for side in sides):
                yield Hit(compare, _message(set_in))
    for call in source.index.nodes(ast.Call):
        compares = isinstance(call.func, ast.Attribute) and call.func.attr in ("ne", "eq", "not_equal")
        if compares and call.args and _is_pad(source, call.args[0]):
            yield Hit(call, _message(set_in))


def _message(line: int) -> str:
    return f"this mask hides real ends of text: pad was made eos in line {line}"


def _same_in_line(source: Source) -> int | None:
    """Where pad becomes eos."""
    for assign in source.index.nodes(ast.Assign):
        targets = [target.attr for target in assign.targets if isinstance(target, ast.Attribute)]
        if any(target in ("pad_token", "pad_token_id") for target in targets) and _names_eos(assign.value):
            return assign.lineno
    for call in source.index.nodes(ast.Call):
        function = getattr(call.func, "attr", "")
        for keyword in call.keywords if function in ("from_pretrained", "add_special_tokens") else ():
            if keyword.arg == "pad_token" and _names_eos(keyword.value):
                return call.lineno
    return None


def _names_eos(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("eos_token", "eos_token_id")


def _is_pad(source: Source, node: ast.expr) -> bool:
    value = source.names.value(node)
    return isinstance(value, ast.Attribute) and value.attr == "pad_token_id"


def _is_scalar(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or _names_eos(node)


def _is_condition(source: Source, node: ast.AST) -> bool:
    """A comparison of single ids, not a mask."""
    parent = source.index.parents.get(node)
    return isinstance(parent, _CONDITIONS) or (isinstance(parent, ast.IfExp) and parent.test is node)
