"""Prompts as users give them, and live decoding that leaves training alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from helixctl.checkpoint.store import load_checkpoint
from helixctl.training.live import ShuffledFeatures, held_out_prompts
from helixctl.training.run import run_training
from tests.chats import make_chat_world, prepare_world
from tests.data import templates
from tests.training.worlds import make_world_plan, tensors_equal

USER = {"role": "user", "content": "hi"}


class Prompts:
    """What is used of a store."""

    def __init__(self, *entries: dict[str, Any]) -> None:
        self.entries = entries

    def prompts(self) -> list[dict[str, Any]]:
        return list(self.entries)


def test_held_out_prompts_pass_over_what_cannot_be_decoded() -> None:
    store: Any = Prompts(
        {"index": 0, "messages": [{"role": "user", "content": "x" * 100}]},
        {"index": 1, "messages": [{"role": "system", "content": "no"}]},
        {"index": 2, "text": "once upon a time"},
        {"index": 3, "messages": [USER], "source": "talk"},
        {"index": 4, "messages": [USER]},
    )
    tokenizer = templates.byte_tokenizer(templates.ALTERNATING)
    assert [p.text for p in held_out_prompts(store, tokenizer, 2, 120)] == ["once upon a time", "hi"]
    assert [p.source for p in held_out_prompts(store, tokenizer, 9, None)] == ["", "", "talk", ""]


class Recording:
    block_size = 4

    def extend(self, features: Any, positions: torch.Tensor, valid: torch.Tensor) -> None:
        self.features = features


def test_shuffled_features_are_the_same_ones_at_other_places() -> None:
    policy: Any = Recording()
    features = [torch.randn(2, 8, 3) for _ in range(2)]
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1, 5:] = False
    ShuffledFeatures(policy, seed=1).extend(features, torch.arange(8).expand(2, -1), valid)
    for mixed, original in zip(policy.features, features, strict=True):
        assert torch.equal(mixed[~valid], original[~valid])
        assert not torch.equal(mixed[valid], original[valid])
        assert torch.equal(mixed[valid].sort(0).values, original[valid].sort(0).values)
    together = torch.cat(policy.features, -1)[valid].tolist()  # taps of one place stay together
    assert sorted(together) == sorted(torch.cat(features, -1)[valid].tolist())


def test_live_decoding_changes_nothing_in_training(tmp_path: Path) -> None:
    recipe = prepare_world(make_chat_world(tmp_path))
    found = {}
    for prompts in (0, 4):
        run = tmp_path / f"run{prompts}"
        run_training(make_world_plan(recipe, f"run.dir={run}", f"validation.live_prompts={prompts}"))
        found[prompts] = load_checkpoint(run / "checkpoints" / "step-00000004").tensors
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert sum("live/accept_len" in line for line in lines) == (2 if prompts else 0)
    assert tensors_equal(found[0]["drafter"], found[4]["drafter"])
    assert tensors_equal(found[0]["optimizer"], found[4]["optimizer"])
