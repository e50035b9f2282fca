"""What is a tokenizer: shared by the rules about them."""

from __future__ import annotations

import ast
import re

from helixctl.doctor.source import Source

_MADE = re.compile(r"^transformers\.\w*Tokenizer(?:Fast)?(?:\.from_pretrained)?\(\)$")


def is_tokenizer(source: Source, node: ast.expr) -> bool:
    """Whether an expression is a tokenizer made in this file by transformers."""
    name = source.names.qualified(node)
    return name is not None and _MADE.match(name) is not None


def looks_like_tokenizer(node: ast.expr) -> bool:
    """Whether an expression is called one."""
    name = getattr(node, "attr", None) or getattr(node, "id", None) or ""
    return "tokenizer" in name.lower() or name in ("tok", "tokeniser")


def is_project_module(source: Source) -> bool:
    """The module that defines the project's tokenizer may use others."""
    required = source.options.project_tokenizer
    if required is None:
        return False
    module, _, name = required.rpartition(".")
    if source.module and (source.module == module or source.module.endswith(f".{module}")):
        return True
    return any(owner.name == name for owner in source.index.nodes(ast.ClassDef))
