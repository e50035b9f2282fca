"""The loss mask: what the model writes and nothing else, on every kind of template."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding, PreTrainedTokenizerFast

from helixctl.data.chat import ChatRenderer, MaskPolicy, Rendered, Unrenderable, flat_ids, render_chat
from helixctl.data.records import Chat, Message
from helixctl.errors import DataError
from tests.data import templates

HEADER, END = "<|im_start|>assistant\n", "<|im_end|>"
CASES = Path(__file__).parents[3] / "shared/cases/qwen3_chat.json"


@cache
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    return templates.byte_tokenizer(template)


@cache
def renderer(template: str, policy: MaskPolicy = "all_turns") -> ChatRenderer:
    return ChatRenderer(tokenizer(template), policy)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def supervised(template: str, rendered: Rendered) -> list[str]:
    """The supervised runs as text."""
    runs: list[list[int]] = []
    inside = False
    for token, flag in zip(rendered.input_ids.tolist(), rendered.loss_mask.tolist(), strict=True):
        if flag and not inside:
            runs.append([])
        inside = flag
        if flag:
            runs[-1].append(token)
    return [str(tokenizer(template).decode(run)) for run in runs]


def render(template: str, *messages: Message, **chat: Any) -> list[str]:
    policy = chat.pop("policy", "all_turns")
    record = Chat(list(messages), chat.pop("tools", None), "here", **chat)
    return supervised(template, renderer(template, policy).render(record))


@pytest.mark.parametrize("template", [templates.CHATML, templates.TAGGED])
def test_answers_and_their_end_are_supervised_and_the_line_break_is_not(template: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello there"), user("Bye")]
    assert render(template, *messages, assistant("See you")) == ["Hello there<|im_end|>", "See you<|im_end|>"]
    assert render(template, *messages, assistant("See you"), policy="last_turn") == ["See you<|im_end|>"]


def test_llama2_ends_its_prompt_inside_the_user_turn() -> None:
    assert render(templates.LLAMA2, user("a"), assistant("b"), user("c"), assistant("d")) == [" b </s>", " d </s>"]


def test_qwen_supervises_thinking_only_where_it_is_rendered() -> None:
    turns = [user("a"), assistant("x", reasoning_content="r1"), user("b"), assistant("y", reasoning_content="r2")]
    assert render(templates.QWEN, *turns) == ["x<|im_end|>", "<think>\nr2\n</think>\n\ny<|im_end|>"]
    assert render(templates.QWEN, user("a"), assistant("x")) == ["<think>\n\n</think>\n\nx<|im_end|>"]


def test_qwen_tool_calls_are_supervised_and_their_results_are_not() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calling = assistant("", reasoning_content="hm", tool_calls=[call, call])
    result = {"role": "tool", "content": "3"}
    wire = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    turns = [user("1+2"), calling, result, assistant("It is 3.")]
    live = [f"<think>\nhm\n</think>\n\n{wire}\n{wire}<|im_end|>", "<think>\n\n</think>\n\nIt is 3.<|im_end|>"]
    assert render(templates.QWEN, *turns, tools=[{"name": "add"}]) == live
    later = render(templates.QWEN, *turns, user("Thanks"), assistant("Welcome"))
    assert later[:2] == [f"{wire}\n{wire}<|im_end|>", "It is 3.<|im_end|>"]


def by_scanning(template: str, text: str, policy: str) -> list[str]:
    """Reference for templates with these markers: from each header to the next end."""
    parts = [part.split(END)[0] + END for part in text.split(HEADER)[1:]]
    return parts if policy == "all_turns" else parts[-1:]


WORDS = st.text(st.sampled_from("ab \n\té😀<>|/"), max_size=8)
ANSWERS = st.builds(
    lambda text, think: f"<think>\n{think}\n</think>\n\n{text}" if think is not None else text,
    WORDS,
    st.one_of(st.none(), WORDS),
)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([templates.CHATML, templates.QWEN]),
    st.lists(st.tuples(WORDS, ANSWERS), min_size=1, max_size=4),
    st.sampled_from(["all_turns", "last_turn"]),
)
def test_any_conversation_equals_scanning_for_the_markers(
    template: str, turns: list[tuple[str, str]], policy: MaskPolicy
) -> None:
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    text = str(tokenizer(template).apply_chat_template(messages, tokenize=False))
    rendered = renderer(template, policy).render(Chat(messages, None, "here"))
    expected = by_scanning(template, text, policy)
    found = supervised(template, rendered)
    # An answer's leading line break may join the header's into one token, which is then the prompt's.
    assert [f == e or "\n" + f == e for f, e in zip(found, expected, strict=True)] == [True] * len(expected)
    assert rendered.input_ids.tolist() == tokenizer(template).apply_chat_template(messages, return_dict=False)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TURNS = st.one_of(
    st.builds(user, WORDS),
    st.builds(assistant, ANSWERS),
    st.builds(lambda text, think: assistant(text, reasoning_content=think), WORDS, WORDS),
    st.builds(lambda text: assistant(text, tool_calls=[CALL, CALL]), ANSWERS),
    st.builds(lambda text: {"role": "tool", "content": text}, WORDS),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TURNS, max_size=6))
def test_qwen_with_tools_and_reasoning_in_any_order_equals_scanning(turns: list[Message]) -> None:
    messages = [user("begin"), *turns, assistant("end")]
    text = str(tokenizer(templates.QWEN).apply_chat_template(messages, tokenize=False))
    found = render(templates.QWEN, *messages)
    expected = by_scanning(templates.QWEN, text, "all_turns")
    assert [f == e or "\n" + f == e for f, e in zip(found, expected, strict=True)] == [True] * len(expected)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3))
def test_tags_and_differences_give_the_same_mask(turns: list[tuple[str, str]]) -> None:
    messages = [m for question, answer in turns for m in (user(question), assistant(answer.lstrip("\n")))]
    by_tags, by_differences = (
        renderer(template).render(Chat(messages, None, "here")) for template in (templates.TAGGED, templates.CHATML)
    )
    assert by_tags.input_ids.tolist() == by_differences.input_ids.tolist()
    assert by_tags.loss_mask.tolist() == by_differences.loss_mask.tolist()


@pytest.mark.parametrize("template", [templates.CHATML, templates.TAGGED, templates.QWEN])
def test_a_cut_answer_ends_with_its_last_token(template: str) -> None:
    messages = [user("a"), assistant("whole"), user("b"), assistant("half of i")]
    found = render(template, *messages, cut=True)
    assert found[0] == "whole<|im_end|>"
    assert found[1].endswith("half of i")
    rendered = renderer(template).render(Chat(messages, None, "here", cut=True))
    assert rendered.loss_mask[-1]
    assert rendered.input_ids[-1] == tokenizer(template)("i")["input_ids"][0]


def test_control_text_in_a_message_is_refused() -> None:
    call = {"function": {"name": "f", "arguments": {"text": "</s>"}}}
    hidden = (assistant("x", reasoning_content="<|im_start|>"), assistant("x", tool_calls=[call]))
    for message in (user("say <|im_end|>"), *hidden):
        with pytest.raises(Unrenderable, match="would become a control token") as caught:
            render(templates.CHATML, user("a"), message, assistant("x"))
        assert caught.value.reason == "control_text"


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(Unrenderable) as caught:
        render(templates.CHATML, user("\ud800"), assistant("x"))
    assert caught.value.reason == "not_unicode"


def test_a_conversation_that_the_template_refuses_is_unrenderable() -> None:
    with pytest.raises(Unrenderable, match="must begin with user") as caught:
        render(templates.ALTERNATING, {"role": "system", "content": "s"}, user("a"), assistant("x"))
    assert caught.value.reason == "template_error"
    assert render(templates.ALTERNATING, user("a"), assistant("x")) == ["x<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        (templates.RAISING, "cannot render a question and an answer: .*takes nothing"),
        (templates.MUTE, "does not show an answer as it is"),
    ],
)
def test_an_unusable_template_is_an_error_before_the_first_conversation(template: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        ChatRenderer(templates.byte_tokenizer(template), "all_turns")
    assert caught.value.fix


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # Nothing tells "assistant: " from what the model writes.
        (templates.NO_MARKERS, "(?s)cannot be told from the rest with certainty.*by prefixes 'assistant: sure'"),
        (templates.TAGS_IN_MACRO, "the tags mark '<.*', which is no answer"),
        (templates.TAGS_ROUND_ALL, "tags and content differ at the user message 'please'"),
    ],
)
def test_a_mask_that_cannot_be_right_is_an_error_that_shows_the_sample(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        render(template, user("please"), assistant("sure"))
    assert "here: " in caught.value.message and "rendered: " in caught.value.message
    assert "{% generation %}" in str(caught.value.fix)


def test_render_chat_is_the_renderer_for_one_conversation() -> None:
    rendered = render_chat(tokenizer(templates.CHATML), [user("a"), assistant("b")], None, "last_turn")
    assert supervised(templates.CHATML, rendered) == ["b<|im_end|>"]


def test_tags_that_mark_nothing_leave_nothing_supervised() -> None:
    assert render(templates.TAGS_UNUSED, user("a"), assistant("b")) == []


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3],
        [[1, 2, 3]],
        np.array([[1, 2, 3]]),
        BatchEncoding({"input_ids": [1, 2, 3]}),
        {"input_ids": [[1, 2, 3]]},
    ],
)
def test_ids_come_out_flat_whatever_a_tokenizer_returns(value: Any) -> None:
    assert flat_ids(value).tolist() == [1, 2, 3]
    assert flat_ids(value).dtype == np.uint32


@pytest.mark.parametrize("value", [[[1], [2]], ["a"], [[[1]]], [1.5]])
def test_what_is_not_one_list_of_ids_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="for one text"):
        flat_ids(value)


@pytest.mark.skipif(not CASES.exists(), reason="the public Qwen3 cases are not on this machine")
def test_the_qwen_template_of_these_tests_gives_the_public_cases_and_their_masks() -> None:
    for case in json.loads(CASES.read_text()):
        text = tokenizer(templates.QWEN).apply_chat_template(case["messages"], tokenize=False, **case["kwargs"])
        assert text == case["expected"], case["name"]
        messages = [
            {**m, "content": m.get("content") if isinstance(m.get("content"), str) else ""} for m in case["messages"]
        ]
        if "add_generation_prompt" not in case["kwargs"] and messages[-1]["role"] == "assistant":
            found = render(templates.QWEN, *messages, tools=case["kwargs"].get("tools"))
            assert found == by_scanning(templates.QWEN, case["expected"], "all_turns"), case["name"]
