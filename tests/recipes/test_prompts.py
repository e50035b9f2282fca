"""The quickstart's prompts: distinct, and of five kinds in equal parts, so that a held-out tenth holds every kind."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

PROMPTS = Path(__file__).resolve().parents[2] / "recipes" / "prompts" / "quickstart.jsonl"


def test_prompts_are_distinct_and_balanced() -> None:
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert all(set(line) == {"id", "kind", "prompt"} for line in lines)
    assert len({line["id"] for line in lines}) == len(lines)
    assert len({line["prompt"].casefold() for line in lines}) == len(lines) >= 200
    kinds = Counter(line["kind"] for line in lines)
    assert set(kinds) == {"lists", "code", "arithmetic", "rewriting", "questions"}
    assert max(kinds.values()) - min(kinds.values()) <= 2
