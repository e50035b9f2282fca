"""Conversations as users give them, and how they are played: answers become history."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helixctl.decoding.decoded import Decoded
from helixctl.errors import DataError
from helixctl.training.conversations import Choice, held_out_conversations, play, read_conversations
from helixctl.training.live import Prompt
from tests.data import templates

USER = {"role": "user", "content": "hi"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path, tokenizer: Any = None, **choice: Any) -> Any:
    return read_conversations([path], tokenizer or templates.byte_tokenizer(), Choice(**choice))


def test_the_three_shapes_give_the_same_prompt(tmp_path: Path) -> None:
    answered = {"messages": [USER, {"role": "assistant", "content": "hello"}]}
    path = write(tmp_path / "p.jsonl", {"prompt": "hi"}, "", {"turns": ["hi", "again"]}, {"messages": [USER]}, answered)
    found = read(path)
    assert [one.first.text for one in found] == ["hi"] * 4
    assert len({one.first.ids for one in found}) == 1
    assert [one.later for one in found] == [(), ("again",), (), ()]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert templates.byte_tokenizer().decode(list(found[0].first.ids)) == expected
    assert [(one.source, one.id) for one in found] == [("p", "1"), ("p", "3"), ("p", "4"), ("p", "5")]


def test_files_are_sources_unless_records_say_otherwise(tmp_path: Path) -> None:
    packed = tmp_path / "gsm8k.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": "one", "id": "q/1"}\n{"prompt": "two"}\n'))
    other = write(tmp_path / "mixed.jsonl", {"prompt": "x", "source": "oasst", "id": 7})
    found = read_conversations([packed, other], templates.byte_tokenizer(), Choice())
    assert [(one.source, one.id) for one in found] == [("gsm8k", "q/1"), ("gsm8k", "2"), ("oasst", "7")]


def test_every_file_is_skipped_into_and_limited(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}"} for i in range(5))) for name in "ab"]
    found = read_conversations(paths, templates.byte_tokenizer(), Choice(skip=2, limit=2))
    assert [one.first.text for one in found] == ["a2", "a3", "b2", "b3"]
    assert [one.first.text for one in read(paths[0], skip=4, limit=9)] == ["a4"]
    with pytest.raises(DataError, match="no prompt behind the first 5") as caught:
        read(paths[0], skip=5)
    assert caught.value.fix == "skip fewer"


def test_turns_are_limited(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"turns": ["one", "two", "three"]})
    assert [read(path, turns=turns)[0].later for turns in (1, 2, 9)] == [(), ("two",), ("two", "three")]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "holds no prompt"),
        ([{"prompt": "x"}, "{broken"], r"p\.jsonl:2: this line is not JSON"),
        (["", {"question": "x"}], r"p\.jsonl:2: there is no prompt"),
        (["[1]"], r"p\.jsonl:1: there is no prompt"),
        ([{"turns": [3]}], r"p\.jsonl:1: there is no prompt"),
        ([{"messages": ["hi"]}], r"p\.jsonl:1: there is no prompt"),
        ([{"messages": []}], r"p\.jsonl:1: the conversation in this line has no user turn"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], r"p\.jsonl:1: .* no user turn"),
    ],
)
def test_bad_prompts_are_named_with_their_line(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        read(write(tmp_path / "p.jsonl", *rows))
    assert '{"prompt": "..."}' in (caught.value.fix or "")


def test_a_prompt_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "x"})
    with pytest.raises(DataError, match=r"p\.jsonl:1: .*template refuses.*takes nothing"):
        read(path, templates.byte_tokenizer(templates.RAISING))
    with pytest.raises(DataError, match=r"p\.jsonl:1: .*chat_template"):
        read(path, templates.byte_tokenizer(None))


class Echo:
    """Answers a prompt with how long it is, and the stop token; keeps what it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.asked: list[list[str]] = []

    def __call__(self, prompts: Sequence[tuple[int, ...]]) -> list[Decoded]:
        self.asked.append([self.tokenizer.decode(list(ids)) for ids in prompts])
        stop = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        said = [(*self.tokenizer.encode(f"{len(ids)}!", add_special_tokens=False), stop) for ids in prompts]
        return [Decoded(ids, tokens, (len(tokens) - 1,), "stop") for ids, tokens in zip(prompts, said, strict=True)]


def test_answers_become_history(tmp_path: Path) -> None:
    rows = [{"turns": ["a", "b", "c"]}, {"prompt": "x"}, {"turns": ["d", "e"]}]
    tokenizer = templates.byte_tokenizer()
    decode = Echo(tokenizer)
    conversations = read(write(tmp_path / "p.jsonl", *rows), tokenizer)
    turns, left_out = play(conversations, tokenizer, decode, None)
    assert left_out == 0
    assert [(turn.conversation, turn.number, turn.prompt.text) for turn in turns] == [
        (0, 0, "a"),
        (0, 1, "b"),
        (0, 2, "c"),
        (1, 0, "x"),
        (2, 0, "d"),
        (2, 1, "e"),
    ]
    assert [len(batch) for batch in decode.asked] == [3, 2, 1]  # all first turns together, then all second ones
    first = decode.asked[0][0]
    length = len(conversations[0].first.ids)
    assert decode.asked[1][0] == f"{first}{length}!<|im_end|>\n" + first.replace("a<", "b<")
    assert all(turn.prompt.ids == turn.decoded.prompt_ids for turn in turns)


def test_turns_without_room_are_counted(tmp_path: Path) -> None:
    rows = [{"turns": ["a", "b", "c"]}, {"turns": ["d", "e"]}]
    tokenizer = templates.byte_tokenizer()
    conversations = read(write(tmp_path / "p.jsonl", *rows), tokenizer)
    turns, left_out = play(conversations, tokenizer, Echo(tokenizer), len(conversations[0].first.ids) + 5)
    assert [(turn.conversation, turn.number) for turn in turns] == [(0, 0), (1, 0)] and left_out == 3
    assert play(conversations, tokenizer, Echo(tokenizer), len(conversations[0].first.ids)) == ([], 5)


def test_a_template_that_refuses_a_history_is_named(tmp_path: Path) -> None:
    only_once = "{% if messages|length > 1 %}{{ raise_exception('once only') }}{% endif %}{{ messages[0]['content'] }}"
    tokenizer = templates.byte_tokenizer(only_once)
    conversations = read(write(tmp_path / "mt.jsonl", {"turns": ["a", "b"], "id": "81"}), tokenizer)
    with pytest.raises(DataError, match=r"mt 81: .*later turn: once only") as caught:
        play(conversations, tokenizer, Echo(tokenizer), None)
    assert "--turns 1" in (caught.value.fix or "")


def test_held_out_prompts_are_conversations_of_one_turn() -> None:
    found = held_out_conversations([Prompt("a", (1,)), Prompt("b", (2,), "talk")])
    assert [(one.source, one.id, one.later) for one in found] == [("held-out", "1", ()), ("talk", "2", ())]
