"""scripts/float8_effect.py on a small world."""

from __future__ import annotations

import json

import pytest

from scripts import float8_effect
from tests.training.conftest import TrainedWorld


def test_float8_is_further_from_float32_than_bfloat16_is(
    trained: TrainedWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    float8_effect.main([str(trained.recipe), "--block", "16", "--documents", "2"])
    exact, rows, blocks, bfloat16 = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert exact["relative error"] == [0.0, 0.0] and exact["same greedy token"] == 1 and exact["tokens"] > 0
    assert all(cosine == pytest.approx(1, abs=1e-4) for cosine in exact["cosine"])
    for float8 in (rows, blocks):
        for small, large in zip(bfloat16["relative error"], float8["relative error"], strict=True):
            assert 0 < small < large < 1
    assert {found["drafter's val/loss"] for found in (exact, rows, blocks)} > {exact["drafter's val/loss"]}
