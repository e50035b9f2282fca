"""Features that are not finite cost their document and nothing else; taps that carry nothing are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helixctl.data.batch import MicroBatch, SlotBatch
from helixctl.errors import ModelError, StageFailed
from helixctl.models.target import Target
from helixctl.training.features import check_taps, count_bad, left_out
from helixctl.training.run import run_training
from helixctl.training.stages import fill_slot, make_slot
from tests.training.worlds import make_world, make_world_plan

SPANS = (((0, 4), (4, 6)), ((0, 3),))  # two rows of 8 tokens; the rest is padding
DOCUMENTS = ((7, 3), (5,))


@pytest.fixture
def batch() -> MicroBatch:
    positions, ids = torch.zeros(2, 8, dtype=torch.int64), torch.full((2, 8), -1, dtype=torch.int32)
    for row, spans in enumerate(SPANS):
        for number, (start, end) in enumerate(spans):
            positions[row, start:end], ids[row, start:end] = torch.arange(end - start), number
    anchors = torch.tensor([[1, 4], [0, 0]])
    valid = torch.tensor([[True, True], [True, False]])
    tokens = torch.arange(16).view(2, 8)
    return MicroBatch(0, "train", 0, 0, tokens, positions, ids, ids >= 0, anchors, valid, DOCUMENTS, SPANS)


def filled(batch: MicroBatch, features: list[Tensor]) -> SlotBatch:
    slot = make_slot((2, 8, 2), len(features), 3, torch.device("cpu"), torch.float32)
    fill_slot(slot, batch, features)
    return slot


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_token_takes_its_document_out_and_no_other(batch: MicroBatch, value: float) -> None:
    features = [torch.ones(2, 8, 3), torch.ones(2, 8, 3)]
    features[1][0, 5, 2] = value  # document 3
    features[0][1, 7] = value  # padding means nothing
    slot = filled(batch, features)
    assert slot.bad is not None and count_bad(slot) == 1
    assert [noted.names() for noted in left_out(slot)] == [(3,)]
    assert slot.anchor_valid.tolist() == [[True, False], [True, False]]
    assert slot.loss_mask[0].tolist() == [True] * 4 + [False] * 4 and torch.equal(slot.loss_mask[1], batch.loss_mask[1])
    assert not slot.features[0][0, 4:6].any() and slot.features[0][0, :4].all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_padding_that_is_not_finite_costs_no_document_and_reaches_no_product(batch: MicroBatch, value: float) -> None:
    features = [torch.ones(2, 8, 3), torch.ones(2, 8, 3)]
    features[0][1, 7] = value
    slot = filled(batch, features)
    assert count_bad(slot) == 0 and torch.equal(slot.anchor_valid, batch.anchor_valid)
    assert all(feature.isfinite().all() for feature in slot.features)  # else 0 x NaN stands in a gradient


def test_good_features_are_left_alone(batch: MicroBatch) -> None:
    slot = filled(batch, [torch.ones(2, 8, 3) * 60000])
    assert count_bad(slot) == 0 and slot.features[0].min() == 60000
    assert torch.equal(slot.anchor_valid, batch.anchor_valid)


def test_taps_that_carry_nothing_are_named(batch: MicroBatch) -> None:
    one, other = torch.randn(2, 8, 3), torch.randn(2, 8, 3)
    check_taps([one, other], (2, 9), batch)
    with pytest.raises(ModelError, match="target layer 9 is zero everywhere"):
        check_taps([one, torch.zeros(2, 8, 3)], (2, 9), batch)
    same = one.clone()
    same[:, 7] = 5.0  # padding
    with pytest.raises(ModelError, match="target layers 2 and 9 have the same output"):
        check_taps([one, same], (2, 9), batch)


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    original = Target.features

    def spoilt(self: Target, batch: Any, **options: Any) -> list[Tensor]:
        features = original(self, batch, **options)
        change(batch, features)
        return features

    monkeypatch.setattr(Target, "features", spoilt)


def test_a_run_leaves_bad_documents_out_names_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def change(batch: MicroBatch, features: list[Tensor]) -> None:
        for row, documents in enumerate(batch.documents):
            if batch.role == "train" and 2 in documents:
                features[0][row, batch.spans[row][documents.index(2)][0]] = math.nan

    recipe = make_world(tmp_path)
    spoil(monkeypatch, change)
    limit = "train.max_bad_fraction=0.5"
    result = run_training(make_world_plan(recipe, limit))
    assert result.finished and result.accounting["documents left out"] == 1  # six rows: one epoch
    assert "not finite and left out: documents 2" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("train/bad_documents", 0) for line in lines) == 1
    assert result.loss is not None and math.isfinite(result.loss)
    with pytest.raises(StageFailed, match=r"not finite for 1 of \d documents"):
        run_training(make_world_plan(recipe, f"run.dir={tmp_path / 'strict'}"))


def test_a_dead_tap_ends_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda batch, features: features[1].zero_())
    with pytest.raises(StageFailed, match="stage 'target-0' failed: the output of target layer 2 is zero everywhere"):
        run_training(make_world_plan(make_world(tmp_path)))
