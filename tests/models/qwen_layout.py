"""The rules of the chat layout as plain Python: slow, obvious, and written without looking at the template."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st

TOOLS_HEAD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_TAIL = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

Pieces = list[tuple[str, bool]]
"""Text, and whether the assistant wrote it."""


def render(
    messages: list[dict[str, Any]], tools: Any = None, add_generation_prompt: bool = False, enable_thinking: Any = None
) -> Pieces:
    pieces: Pieces = []
    rest = list(enumerate(messages))
    first_is_system = bool(messages) and messages[0]["role"] == "system"
    if tools:
        body = text_of(messages[0]) + "\n\n" if first_is_system else ""
        body += TOOLS_HEAD + "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools) + TOOLS_TAIL
        pieces.append((turn("system", body), False))
        rest = rest[1:] if first_is_system else rest
    last_query = pivot(messages)
    for index, message in rest:
        role = message["role"]
        if role in ("system", "user"):
            pieces.append((turn(role, text_of(message)), False))
        elif role == "assistant":
            body = answer(message, index > last_query, index == len(messages) - 1)
            pieces += [("<|im_start|>assistant\n", False), (body + "<|im_end|>", True), ("\n", False)]
        elif role == "tool":
            before = index > 0 and messages[index - 1]["role"] == "tool"
            after = index + 1 < len(messages) and messages[index + 1]["role"] == "tool"
            text = "" if before else "<|im_start|>user"
            text += "\n<tool_response>\n" + text_of(message) + "\n</tool_response>"
            pieces.append((text + ("" if after else "<|im_end|>\n"), False))
    if add_generation_prompt:
        closed = "<think>\n\n</think>\n\n" if enable_thinking is False else ""
        pieces.append(("<|im_start|>assistant\n" + closed, False))
    return pieces


def turn(role: str, body: str) -> str:
    return "<|im_start|>" + role + "\n" + body + "<|im_end|>\n"


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def pivot(messages: list[dict[str, Any]]) -> int:
    queries = [
        i
        for i, m in enumerate(messages)
        if m["role"] == "user"
        and isinstance(m.get("content"), str)
        and not (m["content"].startswith("<tool_response>") and m["content"].endswith("</tool_response>"))
    ]
    return queries[-1] if queries else len(messages) - 1


def answer(message: dict[str, Any], after_query: bool, last: bool) -> str:
    content, reasoning = text_of(message), ""
    if isinstance(message.get("reasoning_content"), str):
        reasoning = message["reasoning_content"]
    elif "</think>" in content:
        before = content[: content.index("</think>")].rstrip("\n")
        reasoning = before[before.rfind("<think>") + len("<think>") :] if "<think>" in before else before
        reasoning = reasoning.lstrip("\n")
        content = content[content.rindex("</think>") + len("</think>") :].lstrip("\n")
    body = content
    if after_query and (last or reasoning != ""):
        body = "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n" + content.lstrip("\n")
    for number, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function") or call
        arguments = function["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        body += "" if number == 0 and content == "" else "\n"
        body += '<tool_call>\n{"name": "' + function["name"] + '", "arguments": ' + written + "}\n</tool_call>"
    return body


# -------------------------------------------------------------------------------------------------------------- chats

WORDS = st.sampled_from(
    [
        "",
        "Hi",
        " x ",
        "\n",
        "\n\n",
        "é<b>&",
        "<think>",
        "</think>",
        "<tool_response>",
        "</tool_response>",
        "1 + 1\n",
        "雪",
    ]
)
TEXTS = st.lists(WORDS, max_size=5).map("".join)
PLAIN_TEXTS = st.lists(
    st.sampled_from(["Hi", " x ", "\n", "  ", "é<b>&", "1 + 1\n", "雪", "don't", "\t"]), max_size=5
).map("".join)
ARGUMENTS = st.one_of(
    st.just("not json"), st.just('{"a": 1}'), st.dictionaries(st.sampled_from(["a", "é", "<b>"]), st.integers(0, 9))
)
FUNCTIONS = st.fixed_dictionaries({"name": st.sampled_from(["add", "look_up"]), "arguments": ARGUMENTS})
CALLS = st.one_of(FUNCTIONS, FUNCTIONS.map(lambda f: {"type": "function", "function": f}))
TOOLS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.just([]), st.just([{"type": "function", "function": {"name": "é<"}}, {"name": "b"}])
)


def messages(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    odd = st.one_of(texts, st.none(), st.just([{"type": "text", "text": "part"}]))
    plain = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": odd})
    assistant = st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": texts},
        optional={"reasoning_content": texts, "tool_calls": st.lists(CALLS, max_size=2)},
    )
    return st.one_of(plain, assistant)


def chats(texts: st.SearchStrategy[str] = TEXTS) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(messages(texts), min_size=1, max_size=6)
