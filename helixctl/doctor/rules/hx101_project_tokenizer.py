"""HX101: another tokenizer than the project's.

What it checks
    Only where `project-tokenizer` is configured: AutoTokenizer, PreTrainedTokenizerFast and every other tokenizer
    class of transformers and tokenizers, by constructor or from_pretrained, and pipeline(tokenizer="..."). The module
    that defines the project's tokenizer is left out.
Why it matters
    The project's tokenizer carries the chat template and its tokens. Another one gives other ids for the same text,
    and nothing fails: the model just learns the wrong thing.
Fix
    Use the project's tokenizer. It is named in [tool.helixctl.doctor] of pyproject.toml.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from helixctl.doctor.finding import Hit
from helixctl.doctor.names import Called
from helixctl.doctor.source import Source
from helixctl.doctor.tokenizing import is_project_module

LEVEL = "error"
MARKERS = ((b"okenizer", b"transformers"), (b"okenizer", b"tokenizers"))
_FOREIGN = re.compile(
    r"^(?:transformers\.\w*Tokenizer(?:Fast|Base)?|tokenizers\.Tokenizer)"
    r"(?:\.(?:from_pretrained|from_file|from_str|from_buffer))?$"
)


def check(source: Source) -> Iterator[Hit]:
    """Calls that make another tokenizer."""
    required = source.options.project_tokenizer
    if required is None or is_project_module(source):
        return
    short = required.rsplit(".", 1)[-1]
    for call in source.calls:
        own = call.name == required or call.name.startswith(f"{required}.")
        if _is_foreign(call) and not own:
            yield Hit(call.node, f"{call.name.removeprefix('transformers.')} is used where {short} is required")


def _is_foreign(call: Called) -> bool:
    if call.name == "transformers.pipeline":
        return isinstance(call.argument("tokenizer"), ast.Constant)
    names = call.names if call.name.count(".") <= 1 else {call.name}
    return any(_FOREIGN.match(name) for name in names)
