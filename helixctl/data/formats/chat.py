"""chat: JSONL of conversations, in OpenAI's shape or ShareGPT's.

``{"messages": [{"role", "content", "reasoning_content"?, "tool_calls"?}], "tools"?, "finish_reason"?}`` or
``{"conversations": [{"from", "value"}]}``; ``field`` names another key for the list. Roles of other collections are
mapped to system, user, assistant and tool; a conversation with any other role is dropped and the role named.
``finish_reason: length`` marks a last answer that was cut. Content in parts is joined when all parts are text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from helixctl.data.files import Selection, SourceReader, parse_json
from helixctl.data.records import Bad, Chat, Message, Piece, Record
from helixctl.recipe.schema import SourceOptions

WHOLE_FILES = False
ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter", "instruction"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatbot", "chatgpt", "ai", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation", "ipython"), "tool"),
}
_FIELDS = ("messages", "conversations", "conversation")
_KEPT = ("name", "tool_call_id")


class _Unusable(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def read(path: Path, options: SourceOptions) -> Iterator[Record]:
    """The conversations of a file or folder."""
    return (parse(piece, options) for piece in SourceReader(path, Selection(WHOLE_FILES)).pieces())


def parse(piece: Piece, options: SourceOptions) -> Record:
    """One conversation.

    Raises:
        DataError: broken JSON.
    """
    row = parse_json(piece)
    try:
        if not isinstance(row, dict):
            raise _Unusable("no_messages", f"the line is not an object but {type(row).__name__}")
        messages = [_message(turn) for turn in _turns(row, options.field)]
        if not any(message["role"] == "assistant" for message in messages):
            raise _Unusable("no_assistant_turn", f"roles: {', '.join(m['role'] for m in messages)}")
        tools = _tools(row.get("tools"))
    except _Unusable as problem:
        return Bad(problem.reason, piece.where, problem.detail)
    cut = row.get("finish_reason") == "length" and messages[-1]["role"] == "assistant"
    return Chat(messages, tools, piece.where, cut)


def _turns(row: Mapping[str, Any], field: str | None) -> list[Any]:
    names = (field,) if field else _FIELDS
    turns = next((row[name] for name in names if isinstance(row.get(name), list)), None)
    if turns is None:
        raise _Unusable("no_messages", f"no list under {' or '.join(map(repr, names))}")
    if not turns:
        raise _Unusable("empty", "the conversation has no messages")
    return list(turns)


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise _Unusable("no_messages", f"a message is not an object but {type(turn).__name__}")
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise _Unusable("unknown_role", repr(name))
    content = turn["content"] if "content" in turn else turn.get("value")
    message: Message = {"role": role, "content": _text(content)}
    reasoning = turn.get("reasoning_content", turn.get("reasoning"))
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    if turn.get("tool_calls"):
        message["tool_calls"] = _tool_calls(turn["tool_calls"])
    elif content is None and reasoning is None:
        raise _Unusable("no_content", f"a message of {name!r} has neither content nor tool calls")
    message.update({key: turn[key] for key in _KEPT if isinstance(turn.get(key), str)})
    return message


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _Unusable("not_text", f"content of type {type(content).__name__} holds more than text")
    return "".join(text for text in texts if isinstance(text, str))


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _Unusable("bad_tool_calls", "tool_calls is not a list of objects")
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Unusable("bad_tool_calls", "a tool call has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Serving engines hand the template an object, and most templates dump it again; a string would be quoted.
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    extra = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**extra, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except ValueError as error:
            raise _Unusable("bad_tools", f"tools is text that is not JSON: {error}") from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _Unusable("bad_tools", "tools is not a list of objects")
    return tools
