"""HX107: a chat template without working generation tags.

What it checks
    Templates written out as strings: {% generation %} inside a macro or a {% set %} block (an error, in tests a
    warning); a template given to a tokenizer without the tag, an error where the file asks for assistant masks, an
    info elsewhere.
Why it matters
    Masks of assistant tokens come from these tags. Without them the mask is all zeros, inside a macro or a set block
    it lies on the wrong tokens; either way the loss is computed on the wrong text and nothing fails.
Fix
    Put {% generation %} and {% endgeneration %} around assistant output, at the top level or inside for and if only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from helixctl.doctor.finding import Hit, Level
from helixctl.doctor.source import Source

LEVEL = "error"
MARKERS = (b"{%",)
_TAG = re.compile(r"\{%-?\s*(macro|endmacro|set|endset|generation|endgeneration)\b([^%]*)-?%\}")
_MASKS = ("return_assistant_tokens_mask", "assistant_only_loss")


def check(source: Source) -> Iterator[Hit]:
    """Template strings."""
    asks = _asks_for_masks(source)
    for constant in source.index.nodes(ast.Constant):
        text = constant.value
        if not isinstance(text, str) or "{%" not in text or _is_documentation(source, constant):
            continue
        where = _misplaced(text)
        if where is not None:
            level: Level | None = "warning" if source.is_test else None
            yield Hit(constant, f"{{% generation %}} inside a {where} block gives a wrong mask", level)
        elif "generation" not in text and "messages" in text and _is_template(source, constant):
            message = "this template has no {% generation %} tag, so masks of assistant tokens are all zeros"
            yield Hit(constant, message, None if asks else "info")


def _misplaced(text: str) -> str | None:
    """The block around a generation tag that makes it useless."""
    depth = {"macro": 0, "set": 0}
    for word, rest in _TAG.findall(text):
        if word == "macro" or (word == "set" and "=" not in rest):
            depth[word] += 1
        elif word in ("endmacro", "endset"):
            depth[word.removeprefix("end")] -= 1
        elif word == "generation":
            around = next((name for name, count in depth.items() if count > 0), None)
            if around is not None:
                return around
    return None


def _asks_for_masks(source: Source) -> bool:
    keywords = (keyword for keyword in source.index.nodes(ast.keyword) if keyword.arg in _MASKS)
    return any(source.names.constant(keyword.value) is True for keyword in keywords)


def _is_template(source: Source, constant: ast.Constant) -> bool:
    """The string becomes a tokenizer's chat template: directly, or through a name."""
    for attribute in source.index.nodes(ast.Attribute):
        assign = source.index.parents.get(attribute)
        is_target = isinstance(assign, ast.Assign) and attribute.attr == "chat_template" and attribute in assign.targets
        if is_target and isinstance(assign, ast.Assign) and source.names.value(assign.value) is constant:
            return True
    return any(
        keyword.arg == "chat_template" and source.names.value(keyword.value) is constant
        for keyword in source.index.nodes(ast.keyword)
    )


def _is_documentation(source: Source, constant: ast.Constant) -> bool:
    """A docstring, or another string that nothing is done with."""
    return isinstance(source.index.parents.get(constant), ast.Expr)
