"""Prompts as users give them, and live decoding that leaves training alone."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helixctl.checkpoint.store import load_checkpoint, read_best
from helixctl.training.live import LiveDecoder, ShuffledFeatures, held_out_prompts
from helixctl.training.run import run_training
from tests.chats import make_chat_world, prepare_world
from tests.data import templates
from tests.training.conftest import TrainedWorld
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
        {"index": 3, "messages": [USER]},
        {"index": 4, "messages": [USER], "source": ""},
    )
    tokenizer = templates.byte_tokenizer(templates.ALTERNATING)
    assert [p.text for p in held_out_prompts(store, tokenizer, 2, 120)] == ["once upon a time", "hi"]
    assert [p.source for p in held_out_prompts(store, tokenizer, 9, None)] == [""] * 4


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


def test_sources_take_turns() -> None:
    entries = [{"text": name, "source": name[0]} for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    store: Any = Prompts(*entries)
    tokenizer = templates.byte_tokenizer()
    assert [p.text for p in held_out_prompts(store, tokenizer, 9, None)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert [p.source for p in held_out_prompts(store, tokenizer, 4, None)] == ["a", "b", "c", "a"]


def test_live_decoding_draws_no_random_number_and_keeps_the_threads_modes(
    trained: TrainedWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def states() -> list[Any]:
        generators = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
        return [*generators, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()]

    seen: list[tuple[list[Any], list[Any]]] = []
    decode = LiveDecoder.__call__

    def watched(self: LiveDecoder, model: Any) -> dict[str, float]:
        before = states()
        found = decode(self, model)
        seen.append((before, states()))
        return found

    monkeypatch.setattr(LiveDecoder, "__call__", watched)
    run_training(trained.plan(f"run.dir={tmp_path / 'run'}"))
    assert len(seen) == 2 and all(before == after for before, after in seen)


def test_a_resumed_run_that_chooses_by_another_metric_begins_to_choose_anew(tmp_path: Path) -> None:
    recipe = prepare_world(make_chat_world(tmp_path))
    run_training(make_world_plan(recipe))
    first = read_best(tmp_path / "run" / "checkpoints")
    assert first is not None and first.metric == "val/accept_len_live"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    run_training(make_world_plan(recipe, "validation.live_prompts=0"), resume=True)
    best = read_best(tmp_path / "run" / "checkpoints")
    assert best is not None and (best.metric, best.step) == ("val/accept_len", 4)


def test_live_decoding_changes_nothing_in_training(tmp_path: Path) -> None:
    recipe = prepare_world(make_chat_world(tmp_path))
    found = {}
    for prompts in (0, 4):
        run = tmp_path / f"run{prompts}"
        run_training(make_world_plan(recipe, f"run.dir={run}", f"validation.live_prompts={prompts}"))
        found[prompts] = load_checkpoint(run / "checkpoints" / "step-00000004").tensors
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert sum("val/accept_len_live" in line for line in lines) == (2 if prompts else 0)
        chosen_by = "val/accept_len_live" if prompts else "val/accept_len"
        values = {line["step"]: line[chosen_by] for line in lines if chosen_by in line}
        best = read_best(run / "checkpoints")
        assert best is not None and (best.metric, best.value) == (chosen_by, max(values.values()))
        assert values[best.step] == best.value
    assert tensors_equal(found[0]["drafter"], found[4]["drafter"])
    assert tensors_equal(found[0]["optimizer"], found[4]["optimizer"])
