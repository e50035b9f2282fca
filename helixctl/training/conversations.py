"""Conversations that `validate` plays: several sources, several turns, the assistant's answers as history.

All conversations are played at once, turn by turn: the first turns of all are one batch of decoding, then the second
turns of those that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from helixctl.data.prompts import BadPrompt, read_prompts
from helixctl.data.prompts import Prompt as Record
from helixctl.decoding.decoded import Decoded
from helixctl.errors import DataError
from helixctl.training.live import TEMPLATE_ERRORS, Prompt, render_prompt

HELD_OUT = "held-out"
"""Source of prompts that come from the store and name none."""
_PROMPT_FIX = 'one JSON object per line is wanted: {"turns": [...]}, {"prompt": "..."} or {"messages": [...]}'
_REASONS = {
    "not_json": "this line is not JSON",
    "no_prompt": "there is no prompt in this line",
    "no_user_turn": "the conversation in this line has no user turn",
}

Decode = Callable[[Sequence[tuple[int, ...]]], Sequence[Decoded]]
"""Answers prompts (token ids), in order."""


@dataclass(frozen=True)
class Conversation:
    """What the user says, and where it comes from."""

    source: str
    """Name of the file without its ending, or what the record itself says."""
    id: str
    """The record's own, else its line."""
    first: Prompt
    messages: tuple[dict[str, Any], ...] = ()
    """Up to the first answer; empty where the prompt is plain text."""
    later: tuple[str, ...] = ()
    """User turns that follow an answer."""
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Turn:
    """One answer in a conversation."""

    conversation: int
    number: int
    """0 is the first answer."""
    prompt: Prompt
    decoded: Decoded


@dataclass(frozen=True)
class Choice:
    """Which conversations of every file are played, and how far."""

    skip: int = 0
    """First so many of every file are left out."""
    limit: int | None = None
    """Most conversations of every file."""
    turns: int | None = None
    """Most turns of every conversation."""


def held_out_conversations(prompts: Iterable[Prompt]) -> list[Conversation]:
    """Held-out prompts as conversations of one turn."""
    return [
        Conversation(prompt.source or HELD_OUT, str(number), prompt) for number, prompt in enumerate(prompts, start=1)
    ]


def read_conversations(paths: Sequence[Path], tokenizer: Any, choice: Choice) -> list[Conversation]:
    """Conversations of JSONL files with ``turns``, ``prompt`` or ``messages`` in every line, file by file.

    Raises:
        DataError: a file cannot be read or gives none, a line holds no prompt, or the chat template refuses one.
    """
    return [found for path in paths for found in _of_file(path, tokenizer, choice)]


def play(
    conversations: Sequence[Conversation], tokenizer: Any, decode: Decode, max_len: int | None
) -> tuple[list[Turn], int]:
    """Answer every turn of every conversation.

    Args:
        conversations: In any order.
        tokenizer: The target's, with its chat template.
        decode: Called once per turn number, with the prompts of all conversations that have such a turn.
        max_len: The target's positions.

    Returns:
        All turns, conversation by conversation; and how many turns were left out because what came before them, or
        their own prompt, leaves no room for an answer.
    """
    turns: list[Turn] = []
    histories = [list(one.messages) for one in conversations]
    fits = [max_len is None or len(one.first.ids) < max_len for one in conversations]
    asked = [(index, one.first) for index, one in enumerate(conversations) if fits[index]]
    left_out = sum(1 + len(one.later) for one, fit in zip(conversations, fits, strict=True) if not fit)
    number = 0
    while asked:
        answers = decode([prompt.ids for _, prompt in asked])
        turns += [Turn(i, number, prompt, answer) for (i, prompt), answer in zip(asked, answers, strict=True)]
        following = []
        for (index, _), answer in zip(asked, answers, strict=True):
            one = conversations[index]
            if number >= len(one.later):
                continue
            said = {"role": "assistant", "content": tokenizer.decode(list(answer.tokens), skip_special_tokens=True)}
            histories[index] += [said, {"role": "user", "content": one.later[number]}]
            prompt = _next_prompt(one, tokenizer, histories[index])
            if max_len is None or len(prompt.ids) < max_len:
                following.append((index, prompt))
            else:
                left_out += len(one.later) - number
        asked, number = following, number + 1
    return sorted(turns, key=lambda turn: (turn.conversation, turn.number)), left_out


def _of_file(path: Path, tokenizer: Any, choice: Choice) -> list[Conversation]:
    end = None if choice.limit is None else choice.skip + choice.limit
    found = [_conversation(path, record, tokenizer, choice) for record in islice(_records(path), choice.skip, end)]
    if not found:
        where = f" behind the first {choice.skip:,}" if choice.skip else ""
        raise DataError(f"{path} holds no prompt{where}", fix=_PROMPT_FIX if not where else "skip fewer")
    return found


def _records(path: Path) -> Iterable[Record]:
    for record in read_prompts(path):
        if isinstance(record, BadPrompt):
            raise DataError(f"{path}:{record.line}: {_REASONS[record.reason]}", fix=_PROMPT_FIX)
        yield record


def _conversation(path: Path, record: Record, tokenizer: Any, choice: Choice) -> Conversation:
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    try:
        first = render_prompt(tokenizer, {"messages": list(record.messages), "tools": record.tools})
    except TEMPLATE_ERRORS as error:
        where = f"{path}:{record.line}"
        raise DataError(
            f"{where}: the target's chat template refuses this prompt: {error}", fix="correct it"
        ) from error
    return Conversation(
        source=str(record.carried.get("source", name)),
        id=str(record.carried.get("id", record.line)),
        first=first,
        messages=record.messages,
        later=record.later if choice.turns is None else record.later[: choice.turns - 1],
        tools=record.tools,
    )


def _next_prompt(one: Conversation, tokenizer: Any, messages: list[dict[str, Any]]) -> Prompt:
    try:
        return render_prompt(tokenizer, {"messages": messages, "tools": one.tools})
    except TEMPLATE_ERRORS as error:
        raise DataError(
            f"{one.source} {one.id}: the target's chat template refuses a later turn: {error}", fix="use --turns 1"
        ) from error
