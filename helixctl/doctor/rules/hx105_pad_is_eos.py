"""HX105: pad is eos, and a mask is made by comparison with pad.

What it checks
    A file that sets a tokenizer's pad_token to its eos_token (or the ids) and compares ids with the pad_token_id of
    the same tokenizer: an error where the statement makes labels, a mask or a loss, a warning elsewhere.
Why it matters
    The mask hides every real eos as well: the model never learns to stop.
Fix
    Make the mask from lengths, or use the tokenizer's attention_mask. Or give padding a token of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.finding import Hit, Level
from helixctl.doctor.source import Source

LEVEL = "error"
MARKERS = tuple((word, b"eos_token") for word in (b"pad_token =", b"pad_token=", b"pad_token_id =", b"pad_token_id="))
_MASKS = ("label", "mask", "-100", "loss", "target", "length")
_CONDITIONS = (ast.If, ast.While, ast.Assert, ast.BoolOp)


def check(source: Source) -> Iterator[Hit]:
    """Comparisons with the pad of a tokenizer whose pad the file makes eos."""
    same = dict(_same(source))
    for compare in source.index.nodes(ast.Compare) if same else ():
        sides = [compare.left, *compare.comparators]
        if isinstance(compare.ops[0], ast.Eq | ast.NotEq) and not any(_is_scalar(side) for side in sides):
            yield from _judge(source, compare, sides, same)
    for call in source.index.nodes(ast.Call) if same else ():
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("ne", "eq", "not_equal"):
            yield from _judge(source, call, call.args, same)


def _judge(source: Source, node: ast.expr, sides: list[ast.expr], same: dict[str, int]) -> Iterator[Hit]:
    """A mask of labels is an error; anything else that is compared may be harmless."""
    if _is_condition(source, node):
        return
    for side in sides:
        value = source.names.value(side)
        is_pad = isinstance(value, ast.Attribute) and value.attr == "pad_token_id"
        line = same.get(ast.unparse(value.value)) if is_pad and isinstance(value, ast.Attribute) else None
        if line is not None:
            level: Level = "error" if _makes_mask(source, node) else "warning"
            yield Hit(node, f"this mask hides real ends of text: pad was made eos in line {line}", level)


def _same(source: Source) -> Iterator[tuple[str, int]]:
    """Tokenizers, as written, whose pad becomes eos, with the line."""
    for assign in source.index.nodes(ast.Assign):
        for target in assign.targets:
            is_pad = isinstance(target, ast.Attribute) and target.attr in ("pad_token", "pad_token_id")
            if is_pad and isinstance(target, ast.Attribute) and _names_eos(assign.value):
                yield ast.unparse(target.value), assign.lineno
    for call in source.index.nodes(ast.Call):
        function = getattr(call.func, "attr", "")
        for keyword in call.keywords if function in ("from_pretrained", "add_special_tokens") else ():
            if keyword.arg == "pad_token" and _names_eos(keyword.value) and isinstance(keyword.value, ast.Attribute):
                yield ast.unparse(keyword.value.value), call.lineno


def _makes_mask(source: Source, node: ast.AST) -> bool:
    """The statement is about labels, a mask or a loss."""
    for parent in source.index.ancestors(node):
        if isinstance(parent, ast.stmt):
            text = ast.unparse(parent).lower() if not hasattr(parent, "body") else ""
            return any(word in text for word in _MASKS)
    return False


def _names_eos(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("eos_token", "eos_token_id")


def _is_scalar(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or _names_eos(node)


def _is_condition(source: Source, node: ast.AST) -> bool:
    """A comparison of single ids, not a mask."""
    parent = source.index.parents.get(node)
    return isinstance(parent, _CONDITIONS) or (isinstance(parent, ast.IfExp) and parent.test is node)
