"""What identifies a tokenizer, so that ids made by another one are never mixed in."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from helixctl.data.store import Store, TokenizerInfo
from helixctl.errors import DataError, ModelError
from helixctl.models.tokenizer import HelixTokenizer, load_tokenizer
from helixctl.recipe.causal_lm import ModelOptions
from helixctl.recipe.schema import TargetOptions


def load_fast_tokenizer(options: TargetOptions | ModelOptions) -> PreTrainedTokenizerBase:
    """The tokenizer of a target, or that of a causal LM of one's own: one that knows the characters of every token.

    Raises:
        ModelError: there is none, or it is not a fast one.
    """
    if isinstance(options, ModelOptions):
        return HelixTokenizer(options.tokenizer_base)
    tokenizer = load_tokenizer(options)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise ModelError(f"{options.model} has no fast tokenizer (tokenizer.json)", fix="convert its tokenizer")
    tokenizer.model_max_length = 1 << 40  # rows are cut later, by the loader; no warnings about length
    return tokenizer


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> TokenizerInfo:
    """Fingerprints and sizes of a fast tokenizer."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for call_setting in ("truncation", "padding"):  # of the last call, not of the tokenizer
        content.pop(call_setting, None)
    content["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return TokenizerInfo(
        sha256=_sha256(json.dumps(content, sort_keys=True)),
        template_sha256=_sha256(json.dumps(tokenizer.chat_template or "", sort_keys=True)),
        vocab_size=len(tokenizer),
        eos_token_id=_one_id(tokenizer.eos_token_id),
        pad_token_id=_one_id(tokenizer.pad_token_id),
    )


def check_tokenizer(store: Store, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare a store with a tokenizer.

    Raises:
        DataError: the store was made with another tokenizer or chat template; says which.
    """
    made_with, now = store.manifest.tokenizer, describe_tokenizer(tokenizer)
    differing = [
        name
        for name, same in (
            ("tokenizer", made_with.sha256 == now.sha256),
            ("chat template", made_with.template_sha256 == now.template_sha256),
        )
        if not same
    ]
    if differing:
        raise DataError(
            f"the store {store.path} was made with another {' and another '.join(differing)} than the recipe's",
            fix="run `helixctl prepare` again",
            see="errors.md#another-tokenizer",
        )


def _one_id(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
