"""From decoded turns to what is reported: every prompt, every source, all together. Runs no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from helixctl.decoding.acceptance import acceptance_by_position
from helixctl.decoding.decoded import Decoded, accept_len
from helixctl.training.conversations import Conversation, Turn
from helixctl.training.results import PromptResult, Segment, SourceResult, TurnResult

ALL = "all"
_MAX_CHARACTER_TOKENS = 4
"""UTF-8 has no longer ones."""

Identical = Sequence[bool] | None
"""Of every turn, whether plain greedy decoding gives the same; None where nothing was compared."""


def prompt_results(
    conversations: Sequence[Conversation], turns: Sequence[Turn], identical: Identical, tokenizer: Any
) -> tuple[PromptResult, ...]:
    """One result per conversation that was played, with all its turns."""
    found = []
    for index, numbered in groupby(enumerate(turns), key=lambda pair: pair[1].conversation):
        played = list(numbered)
        answers = [turn.decoded for _, turn in played]
        found.append(
            PromptResult(
                source=conversations[index].source,
                id=conversations[index].id,
                num_tokens=sum(len(answer.tokens) for answer in answers),
                num_cycles=sum(len(answer.accepted) for answer in answers),
                accept_len=accept_len(answers),
                turns=tuple(
                    TurnResult(
                        prompt=turn.prompt.text,
                        num_tokens=len(turn.decoded.tokens),
                        accept_len=turn.decoded.accept_len,
                        identical=None if identical is None else identical[place],
                        segments=make_segments(tokenizer, turn.decoded),
                    )
                    for place, turn in played
                ),
            )
        )
    return tuple(found)


def source_results(
    conversations: Sequence[Conversation], turns: Sequence[Turn], identical: Identical
) -> tuple[SourceResult, ...]:
    """One result per source, in the order of their first conversations."""
    places: dict[str, list[int]] = {}
    for place, turn in enumerate(turns):
        places.setdefault(conversations[turn.conversation].source, []).append(place)
    return tuple(_source_result(name, turns, identical, own) for name, own in places.items())


def total_result(turns: Sequence[Turn], identical: Identical) -> SourceResult:
    """All sources as one."""
    return _source_result(ALL, turns, identical, range(len(turns)))


def make_segments(tokenizer: Any, decoded: Decoded) -> tuple[Segment, ...]:
    """The answer's pieces; tokens that only together make a character are one piece, of the kind of the last."""
    return tuple(_segments(tokenizer, decoded))


def _segments(tokenizer: Any, decoded: Decoded) -> Iterator[Segment]:
    held: list[int] = []
    for token, kind in decoded.segments:
        held.append(token)
        text = tokenizer.decode(held)
        if not text.endswith("\ufffd") or len(held) == _MAX_CHARACTER_TOKENS:
            yield Segment(text, kind)
            held = []
    if held:
        yield Segment(tokenizer.decode(held), decoded.segments[-1][1])


def _source_result(name: str, turns: Sequence[Turn], identical: Identical, places: Sequence[int]) -> SourceResult:
    """The turns at ``places`` together."""
    answers = [turns[place].decoded for place in places]
    by_prompt: dict[int, list[Decoded]] = {}
    for place in places:
        by_prompt.setdefault(turns[place].conversation, []).append(turns[place].decoded)
    positions = acceptance_by_position(answers)
    num_cycles = sum(len(answer.accepted) for answer in answers)
    num_verified, num_accepted = sum(answer.num_verified for answer in answers), sum(p.accepted for p in positions)
    means = [mean for mean in map(accept_len, by_prompt.values()) if mean is not None]
    return SourceResult(
        source=name,
        num_prompts=len(by_prompt),
        num_turns=len(places),
        num_tokens=sum(len(answer.tokens) for answer in answers),
        score=sum(means) / len(means) if means else None,
        accept_len=accept_len(answers),
        identical=None if identical is None else sum(identical[place] for place in places),
        positions=positions,
        verified_per_cycle=num_verified / num_cycles if num_cycles else None,
        accepted_per_verified=num_accepted / num_verified if num_verified else None,
    )
