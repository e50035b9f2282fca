"""Reads the prompts that a target shall answer, from JSONL in the usual shapes. Answers nothing, tokenises nothing."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from helixctl.errors import DataError

Message = dict[str, Any]

CARRIED = ("id", "source", "kind", "tools")
"""Fields that go from a prompt to its answer."""


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a user turn."""

    messages: tuple[Message, ...]
    carried: dict[str, Any] = field(default_factory=dict)
    """Those of the record's fields that are named in CARRIED."""
    line: int = field(default=0, compare=False)
    """Where it stands in its file, from 1."""
    later: tuple[str, ...] = ()
    """User turns that refer to answers that do not exist yet."""

    @property
    def tools(self) -> list[Any] | None:
        """Tool descriptions for the chat template."""
        return self.carried.get("tools")

    @property
    def hash(self) -> str:
        """Of the messages and tools: the same prompt has the same hash wherever it stands."""
        text = json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class BadPrompt:
    """A line that holds no prompt."""

    reason: str
    """A short name, to count by."""
    line: int = field(default=0, compare=False)
    """Where it stands in its file, from 1."""


def read_prompts(path: Path) -> Iterator[Prompt | BadPrompt]:
    """Yield one item per non-empty line of a JSONL file, which may end in .gz.

    A record is `{"prompt": text}`, or `{"messages": [...]}`, cut after its last user turn, or `{"turns": [text, ...]}`,
    of which the first is the prompt and the others come `later`. `CARRIED` fields are kept.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield replace(_parse(line), line=number)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"cannot read the prompts {path}: {reason}", fix="give a JSONL file in UTF-8") from error


def _parse(line: str) -> Prompt | BadPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return BadPrompt("not_json")
    messages = _messages(record) if isinstance(record, dict) else None
    if messages is None:
        return BadPrompt("no_prompt")
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        return BadPrompt("no_user_turn")
    carried = {name: record[name] for name in CARRIED if record.get(name) is not None}
    return Prompt(tuple(messages[: last + 1]), carried, later=_later(record))


def _messages(record: dict[str, Any]) -> list[Message] | None:
    """The record's messages, each with a role; None where it has none of the shapes."""
    for name in ("prompt", "turns", "messages"):
        value = record.get(name)
        if name == "turns" and isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value.strip() and name != "messages":
            return [{"role": "user", "content": value}]
        if name == "messages" and isinstance(value, list) and all(map(_is_message, value)):
            return value
    return None


def _later(record: dict[str, Any]) -> tuple[str, ...]:
    """Further user turns; none where the record has another shape, or turns that are no text."""
    turns = record.get("turns")
    if record.get("prompt") or not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        return ()
    return tuple(turns[1:])


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)
