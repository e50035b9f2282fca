"""A short look at a model's tokenizer and at training data, for `init`. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from helixctl.data.files import SourceReader, parse_json
from helixctl.data.records import Bad, Chat, Text, Tokens
from helixctl.errors import DataError, HelixError, UsageError
from helixctl.models.facts import TargetFacts, find_model_file, unreadable
from helixctl.plugins import FORMATS, load_plugin, plugin_names
from helixctl.recipe.schema import SourceOptions

_LOOKED_AT = 200
_CHARACTERS_PER_TOKEN = 3.5
_TURN_TOKENS = 8
_TELLING = ("mask", "reserved", "unused")


@dataclass(frozen=True)
class TokenizerPeek:
    """What a tokenizer's files say, as far as they exist."""

    length: int | None
    """One more than its largest id."""
    special: dict[int, str]
    """Added special tokens."""
    template: str
    """Chat template; empty without one."""
    encoder: Any
    """A `tokenizers.Tokenizer`, or None."""


@dataclass(frozen=True)
class DataPeek:
    """What the first documents look like."""

    format: str
    field: str | None
    texts: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of each."""
    counted: bool
    """By the tokenizer; otherwise estimated from characters."""

    @property
    def long_length(self) -> int:
        """95 of 100 documents are at most this long."""
        return sorted(self.lengths)[min(len(self.lengths) - 1, len(self.lengths) * 95 // 100)]


@dataclass(frozen=True)
class MaskToken:
    """A row of the embedding for masked places, and how it was chosen."""

    id: int
    reason: str


def peek_tokenizer(model: str) -> TokenizerPeek:
    """Read tokenizer.json, tokenizer_config.json and the chat template of a model, each of which may be missing."""
    content, config = _read_json(model, "tokenizer.json"), _read_json(model, "tokenizer_config.json")
    template_file = find_model_file(model, "chat_template.jinja")
    template = template_file.read_text(encoding="utf-8") if template_file else str(config.get("chat_template") or "")
    encoder, length = None, None
    if content:
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_str(json.dumps(content))
        length = 1 + max(encoder.get_vocab(with_added_tokens=True).values(), default=-1)
    special = {int(t["id"]): str(t["content"]) for t in content.get("added_tokens", ()) if t.get("special")}
    return TokenizerPeek(length, special, template, encoder)


def peek_data(path: Path, tokenizer: TokenizerPeek) -> DataPeek:
    """Find the format that understands most of the first documents, and how long these are.

    Raises:
        UsageError: there is nothing at `path`.
        DataError: no format understands it.
    """
    if not path.exists():
        raise UsageError(f"there is no {path}", fix="check the path of the training documents")
    keys = _keys(path)
    for field in (None, *keys):
        found = [(len(texts), name, texts) for name in plugin_names(FORMATS) if (texts := _try(name, path, field))]
        if found:
            _, name, texts = max(found)
            count = _counter(tokenizer)
            lengths = tuple(count(text) if isinstance(text, str) else len(text) for text in texts)
            shown = tuple(text for text in texts if isinstance(text, str))
            return DataPeek(name, field, shown, lengths, tokenizer.encoder is not None)
    problem = f"no format understands these documents; their keys are {', '.join(keys)}" if keys else "no documents"
    fix = f"use one of the formats {', '.join(plugin_names(FORMATS))}"
    raise DataError(f"{path}: {problem}", fix=fix, see="data.md#sources")


def choose_mask_token(facts: TargetFacts, tokenizer: TokenizerPeek, texts: tuple[str, ...]) -> MaskToken | None:
    """A row of the embedding that no text can contain; None where nothing is known of the tokenizer.

    A row behind the tokenizer's last id cannot occur at all, and published drafters use it where there is one.
    Otherwise an added special token that neither the model nor its chat template uses, if possible one named for it.
    """
    if tokenizer.length is None:
        return None
    if tokenizer.length < facts.vocab_size:
        reason = f"first row behind the tokenizer's {tokenizer.length} tokens: no text contains it"
        return MaskToken(tokenizer.length, reason)
    used = {*facts.bos_token_ids, *facts.eos_token_ids, *facts.pad_token_ids}
    free = [
        i
        for i, text in sorted(tokenizer.special.items())
        if i not in used
        and i < facts.vocab_size
        and text not in tokenizer.template
        and not _occurs(text, texts)
        and "unk" not in text.lower()
    ]
    if not free:
        return None
    telling = [i for i in free if any(word in tokenizer.special[i].lower() for word in _TELLING)]
    chosen = (telling or free)[-1]
    return MaskToken(chosen, f"{tokenizer.special[chosen]}: a special token that neither model nor chat template uses")


def _occurs(word: str, texts: tuple[str, ...]) -> bool:
    return any(word in text for text in texts)


def _read_json(model: str, name: str) -> dict[str, Any]:
    path = find_model_file(model, name)
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return content if isinstance(content, dict) else {}


def _keys(path: Path) -> tuple[str, ...]:
    """Keys of the first document, if it is a JSON object."""
    try:
        row = parse_json(next(SourceReader(path).pieces()))
    except (HelixError, StopIteration):
        return ()
    return tuple(row) if isinstance(row, dict) else ()


def _try(name: str, path: Path, field: str | None) -> list[str | list[int]] | None:
    """Texts (or ids) of the first documents as this format reads them; None if it understands less than half."""
    options = SourceOptions(path=path, format=name, field=field)
    try:
        records = list(islice(load_plugin(FORMATS, name).read(path, options), _LOOKED_AT))
    except HelixError:
        return None
    good = [text for record in records if (text := _content(record)) is not None]
    return good if good and 2 * len(good) > len(records) else None


def _content(record: Chat | Text | Tokens | Bad) -> str | list[int] | None:
    if isinstance(record, Chat):
        turns: Iterator[str] = (str(message.get("content") or "") for message in record.messages)
        return "\n".join(turns)
    if isinstance(record, Text):
        return record.text
    return list(record.input_ids) if isinstance(record, Tokens) else None


def _counter(tokenizer: TokenizerPeek) -> Callable[[str], int]:
    """Tokens of a text and of what a chat template puts around its turns."""
    if tokenizer.encoder is None:
        return lambda text: round(len(text) / _CHARACTERS_PER_TOKEN) + _TURN_TOKENS
    encode = tokenizer.encoder.encode
    return lambda text: len(encode(text).ids) + _TURN_TOKENS
