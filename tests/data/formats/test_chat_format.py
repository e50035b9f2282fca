"""The chat format: shapes, roles, tools, and what is dropped for which reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helixctl.data.formats import chat
from helixctl.data.records import Bad, Chat, Piece, Record
from helixctl.errors import DataError
from helixctl.recipe.schema import SourceOptions

ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def parse(row: Any, field: str | None = None) -> Record:
    options = SourceOptions(path=Path("f"), field=field)
    return chat.parse(Piece("f.jsonl", 7, json.dumps(row).encode()), options)


def messages(row: Any, field: str | None = None) -> list[dict[str, Any]]:
    record = parse(row, field)
    assert isinstance(record, Chat), record
    return record.messages


def test_openai_and_sharegpt_shapes_are_the_same_conversation() -> None:
    openai = {"messages": [{"role": "system", "content": "s"}, ASKED, ANSWERED]}
    sharegpt = {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]}
    sharegpt["conversations"].append({"from": "gpt", "value": "a"})
    assert messages(openai) == messages(sharegpt) == [{"role": "system", "content": "s"}, ASKED, ANSWERED]
    assert messages({"dialog": [ASKED, ANSWERED]}, "dialog") == [ASKED, ANSWERED]


@pytest.mark.parametrize(
    ("alias", "role"),
    [("human", "user"), ("gpt", "assistant"), ("model", "assistant"), ("tool", "tool"), ("developer", "system")],
)
def test_roles_of_other_collections_are_mapped(alias: str, role: str) -> None:
    assert messages({"messages": [{"role": alias, "content": "x"}, ANSWERED]})[0]["role"] == role


def test_reasoning_tool_calls_and_tools_are_kept() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": [{"type": "text", "text": "1"}, "2"]}
    record = parse({"messages": [ASKED, turn, result, ANSWERED], "tools": '[{"name": "add"}]'})
    assert isinstance(record, Chat)
    assert record.tools == [{"name": "add"}]
    assert record.messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    assert record.messages[2] == {"role": "tool", "content": "12", "name": "add", "tool_call_id": "c1"}


def test_flat_calls_and_arguments_that_are_not_json_are_kept_as_they_are() -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [{"name": "run", "arguments": "not json"}]}
    call = {"type": "function", "function": {"name": "run", "arguments": "not json"}}
    assert messages({"messages": [ASKED, turn]})[1]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("reason", "last", "cut"), [("length", ANSWERED, True), ("stop", ANSWERED, False), ("length", ASKED, False)]
)
def test_a_length_limit_marks_the_last_answer_as_cut(reason: str, last: Any, cut: bool) -> None:
    record = parse({"messages": [ASKED, ANSWERED, last], "finish_reason": reason})
    assert isinstance(record, Chat) and record.cut == cut


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ([1], "no_messages", "not an object but list"),
        ({}, "no_messages", "no list under 'messages' or 'conversations'"),
        ({"messages": "hello"}, "no_messages", "no list under"),
        ({"messages": []}, "empty", "no messages"),
        ({"messages": ["hello"]}, "no_messages", "not an object but str"),
        ({"messages": [{"role": "laguna_s", "content": "x"}]}, "unknown_role", "'laguna_s'"),
        ({"messages": [{"content": "x"}]}, "unknown_role", "None"),
        ({"messages": [ASKED]}, "no_assistant_turn", "roles: user"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "no_content", "neither content nor tool calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not_text", "more than text"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": "x"}]}, "bad_tool_calls", "not a list"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{}]}]}, "bad_tool_calls", "no function name"),
        ({"messages": [ASKED, ANSWERED], "tools": "{"}, "bad_tools", "not JSON"),
        ({"messages": [ASKED, ANSWERED], "tools": 5}, "bad_tools", "not a list"),
    ],
)
def test_rows_of_no_use_say_why(row: Any, reason: str, detail: str) -> None:
    record = parse(row)
    assert isinstance(record, Bad)
    assert (record.reason, record.where) == (reason, "f.jsonl:7")
    assert detail in record.detail


@pytest.mark.parametrize("raw", [b"{", b'{"messages": [}', b"\xff\xfe\x00", b"[" * 100_000])
def test_broken_json_names_file_and_line(raw: bytes) -> None:
    with pytest.raises(DataError, match=r"f\.jsonl:7: not JSON"):
        chat.parse(Piece("f.jsonl", 7, raw), SourceOptions(path=Path("f")))
