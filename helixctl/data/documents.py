"""One record into one document: tokenised, masked, hashed, and given to a split. Runs in prepare's processes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from helixctl.data.anchors import first_anchor
from helixctl.data.chat import ChatRenderer, MaskPolicy, Unrenderable, flat_ids
from helixctl.data.records import Bad, Chat, Record, Text, Tokens
from helixctl.data.store import SplitName

_HASH_STEPS = 1_000_000
_TEXT_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Document:
    """A document of L tokens, ready for the store."""

    input_ids: NDArray[np.uint32]  # [L]
    loss_mask: NDArray[np.bool_]  # [L]
    digest: bytes
    """sha256 of the content before tokenising; equal documents have equal ones."""
    split: SplitName
    prompt: dict[str, Any] | None
    """Validation only: what the target is asked in live decoding."""
    templated: bool
    """The mask comes from the chat template; else it was given, or all is supervised."""


@dataclass(frozen=True)
class DocumentOptions:
    """What of the recipe decides a document."""

    mask_policy: MaskPolicy
    validation_fraction: float
    mask_token_id: int | None = None
    """A drafter's mask token: a document that holds it is of no use."""


class DocumentMaker:
    """Makes documents of one tokenizer. The chat template is looked at when the first conversation comes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: DocumentOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._vocab_size = len(tokenizer)
        self._renderer: ChatRenderer | None = None

    def make(self, record: Record, *, held_out: bool) -> Document | Bad:
        """The document of one record, or why there is none; ``held_out``: its source is for validation only.

        Raises:
            DataError: the chat template cannot be used, or its answers cannot be found with certainty.
        """
        if isinstance(record, Bad):
            return record
        try:
            ids, mask = self._tokenise(record)
        except Unrenderable as problem:
            return Bad(problem.reason, record.where, problem.detail)
        if first_anchor(mask) < 0:
            text = self._tokenizer.decode(ids[:200].tolist())
            detail = f"{int(mask.sum())} of {ids.size} tokens supervised, no two in a row: {str(text)[:200]!r}"
            return Bad("no_anchor", record.where, detail)
        mask_token = self._options.mask_token_id
        if mask_token is not None and (ids == mask_token).any():
            place, text = int((ids == mask_token).argmax()), str(self._tokenizer.decode([mask_token]))
            return Bad("mask_token", record.where, f"{text!r} is token {place + 1} of {ids.size}")
        digest = content_digest(record)
        split: SplitName = "validation" if held_out or self._is_held_out(prompt_digest(record)) else "train"
        prompt = self._prompt(record, ids) if split == "validation" else None
        return Document(ids, mask, digest, split, prompt, templated=isinstance(record, Chat))

    def _tokenise(self, record: Chat | Text | Tokens) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        if isinstance(record, Chat):
            if self._renderer is None:
                self._renderer = ChatRenderer(self._tokenizer, self._options.mask_policy)
            rendered = self._renderer.render(record)
            return rendered.input_ids, rendered.loss_mask
        if isinstance(record, Text):
            try:
                record.text.encode()
            except UnicodeEncodeError as error:
                raise Unrenderable("not_unicode", str(error)) from error
            ids = flat_ids(self._tokenizer(record.text)["input_ids"])
            return ids, np.ones(ids.size, dtype=np.bool_)
        ids = np.array(record.input_ids, dtype=np.uint32)
        if ids.size and int(ids.max()) >= self._vocab_size:
            detail = f"id {ids.max()}, the tokenizer ends at {self._vocab_size - 1}"
            raise Unrenderable("outside_vocabulary", detail)
        return ids, np.array(record.loss_mask, dtype=np.bool_)

    def _is_held_out(self, digest: bytes) -> bool:
        return hash_fraction(digest, 0) < self._options.validation_fraction

    def _prompt(self, record: Chat | Text | Tokens, ids: NDArray[np.uint32]) -> dict[str, Any] | None:
        if isinstance(record, Chat):
            first = _first_answer(record)
            tools = {"tools": record.tools} if record.tools else {}
            return {"messages": record.messages[:first], **tools} if first else None
        if isinstance(record, Text):
            begin = ids[: min(_TEXT_PROMPT_TOKENS, ids.size // 2)].tolist()
            text = self._tokenizer.decode(begin, skip_special_tokens=True)
            return {"text": text} if text else None
        return None


def content_digest(record: Chat | Text | Tokens) -> bytes:
    """sha256 of a record's content, wherever it was read and however its JSON was laid out."""
    content: Any
    if isinstance(record, Chat):
        content = ["chat", record.messages, record.tools]
    elif isinstance(record, Text):
        content = ["text", record.text]
    else:
        content = ["tokens", list(record.input_ids), [int(m) for m in record.loss_mask]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()


def prompt_digest(record: Chat | Text | Tokens) -> bytes:
    """sha256 of what decides the split: of a chat the turns before the first answer, else the whole content.

    Several answers to one prompt go to one split, so a held-out prompt was never seen in training.
    """
    if not isinstance(record, Chat):
        return content_digest(record)
    prompt = record.messages[: _first_answer(record)]
    return hashlib.sha256(json.dumps(["chat", prompt, record.tools], sort_keys=True).encode()).digest()


def _first_answer(record: Chat) -> int:
    return next(i for i, message in enumerate(record.messages) if message["role"] == "assistant")


def hash_fraction(digest: bytes, draw: int) -> float:
    """A number in [0, 1), uniform over contents, in steps of one millionth; different draws are independent."""
    return int.from_bytes(digest[8 * draw : 8 * draw + 8], "big") % _HASH_STEPS / _HASH_STEPS
