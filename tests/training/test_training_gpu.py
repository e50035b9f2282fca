"""The commands on a GPU, as a user calls them: train with live decoding, validate in every way, export."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixctl.checkpoint.store import read_best
from helixctl.machine import read_machine
from helixctl.plan import Plan, make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training.commands import run_export
from helixctl.training.conversations import Choice
from helixctl.training.run import run_training
from helixctl.training.validate import ValidationRequest, run_validation
from tests.chats import make_chat_world, prepare_world, write_jsonl


@pytest.mark.gpu
@pytest.mark.slow
def test_train_validate_and_export_on_a_gpu(tmp_path: Path) -> None:
    recipe = prepare_world(make_chat_world(tmp_path))

    def plan(*overrides: str) -> Plan:
        return make_plan(load_recipe(recipe, ("compile.mode=off", *overrides)), read_machine())

    assert plan().target_devices[0].startswith("cuda")
    result = run_training(plan())
    assert result.validation["val/accept_len_live"] >= 1.0
    best = read_best(Path(result.run_dir) / "checkpoints")
    assert best is not None and best.metric == "val/accept_len_live"

    found = run_validation(plan())
    assert found.lossless and len(found.proofs) == 4
    assert all(proof.passed for proof in found.proofs), found.proofs
    assert found.plain_tokens_per_s and found.speculative_tokens_per_s

    bench = (write_jsonl(tmp_path / "talk.jsonl", [{"turns": [f"count to {i}", "again"]} for i in range(24)]),)
    half = run_validation(plan("target.dtype=bfloat16", "validation.batch_size=16"), ValidationRequest(bench=bench))
    assert [check.dtype for check in half.greedy] == ["float32", "bfloat16"] and half.lossless
    sampled = ValidationRequest(bench=bench, temperature=1.0, max_new_tokens=40, block_size=2, choice=Choice(skip=4))
    drawn = run_validation(plan("validation.batch_size=16"), sampled)
    assert drawn.samples is not None and drawn.samples.holds and drawn.samples.num_tokens > 800
    assert run_export(plan()).max_logit_diff < 1e-3
