"""Means over prompts, over cycles, by source and by position: by hand."""

from __future__ import annotations

import pytest

from helixctl.decoding.decoded import Decoded
from helixctl.training.conversations import Conversation, Turn
from helixctl.training.live import Prompt
from helixctl.training.scores import make_segments, prompt_results, source_results, total_result
from tests.data import templates

PROMPT = Prompt("hi", (1,))
CONVERSATIONS = [Conversation(source, name, PROMPT) for source, name in (("a", "1"), ("b", "1"), ("a", "2"))]


def turn(conversation: int, number: int, *accepted: int) -> Turn:
    tokens = tuple(range(40, 41 + sum(accepted)))
    judged = tuple(3 for _ in accepted)
    return Turn(conversation, number, PROMPT, Decoded((1,), tokens, accepted, "length", judged))


TURNS = [turn(0, 0, 4, 4), turn(0, 1, 1), turn(1, 0, 2, 2, 2), turn(2, 0)]
SAME = [True, False, True, True]


def test_every_prompt_is_reported_with_all_its_turns() -> None:
    found = prompt_results(CONVERSATIONS, TURNS, SAME, templates.byte_tokenizer())
    assert [(one.source, one.id, one.num_cycles, one.accept_len) for one in found] == [
        ("a", "1", 3, 3.0),
        ("b", "1", 3, 2.0),
        ("a", "2", 0, None),
    ]
    assert [[part.identical for part in one.turns] for one in found] == [[True, False], [True], [True]]
    assert [part.accept_len for part in found[0].turns] == [4.0, 1.0]


def test_a_score_weighs_prompts_and_a_length_weighs_cycles() -> None:
    a, b = source_results(CONVERSATIONS, TURNS, SAME)
    assert (a.source, a.num_prompts, a.num_turns, a.identical) == ("a", 2, 3, 2)
    assert a.score == 3.0  # the prompt without a cycle has no mean
    assert (b.source, b.score, b.accept_len) == ("b", 2.0, 2.0)
    total = total_result(TURNS, SAME)
    assert total.score == 2.5 and total.accept_len == pytest.approx(15 / 6)
    assert total.num_tokens == a.num_tokens + b.num_tokens == 19
    assert [p.accepted for p in total.positions] == [5, 2, 2]
    assert [p.share for p in a.positions] == pytest.approx([2 / 3] * 3)


def test_nothing_compared_and_nothing_decoded() -> None:
    assert total_result(TURNS, None).identical is None
    nothing = total_result([TURNS[3]], None)
    assert nothing.score is None and nothing.accept_len is None and nothing.positions == ()


def test_pieces_of_one_character_are_shown_together() -> None:
    tokenizer = templates.byte_tokenizer()
    ids = tuple(tokenizer.encode("aé!", add_special_tokens=False))
    assert len(ids) == 4
    decoded = Decoded(prompt_ids=(1,), tokens=ids, accepted=(3,), finish="length", last_is_bonus=True)
    assert [(s.text, s.kind) for s in make_segments(tokenizer, decoded)] == [
        ("a", "prefill"),
        ("é", "draft"),
        ("!", "bonus"),
    ]
    cut = Decoded(prompt_ids=(1,), tokens=ids[:2], accepted=(1,), finish="length")
    assert [s.text for s in make_segments(tokenizer, cut)] == ["a", "\ufffd"]
