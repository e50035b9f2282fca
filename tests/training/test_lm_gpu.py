"""Causal LMs on a GPU: compiled layers with flex attention train as the CPU does, and nothing is compiled again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.data.batch import SlotBatch
from helixctl.lm_plan import make_lm_plan
from helixctl.machine import read_machine
from helixctl.models.causal_lm import CausalLM, build_causal_lm
from helixctl.models.facts import read_model_facts
from helixctl.recipe.causal_lm import ModelOptions
from helixctl.training.lm_validate import run_lm_validation
from helixctl.training.run import run_training
from tests.lm_worlds import load_lm, make_lm_world, make_lm_world_plan

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "vocab_size": 320, "num_key_value_heads": 2, **SIZES},
    "windows": {"model_type": "mistral", "vocab_size": 320, "num_key_value_heads": 2, "sliding_window": 40, **SIZES},
    "softcaps": {
        **{"model_type": "gemma2", "vocab_size": 320, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 40},
        **{"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, **SIZES},
    },
}
LENGTHS = ((100, 150, 6), (256,), (30, 40, 50, 60))
S = 256


def make_slot(device: str) -> SlotBatch:
    """Rows of documents of the lengths above, three quarters of them supervised."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), S)
    documents, positions = torch.full(shape, -1, dtype=torch.int32), torch.zeros(shape, dtype=torch.int64)
    spans = []
    for row, lengths in enumerate(LENGTHS):
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        spans.append(tuple((end - length, end) for length, end in zip(lengths, ends, strict=True)))
        for number, (start, end) in enumerate(spans[-1]):
            documents[row, start:end] = number
            positions[row, start:end] = torch.arange(end - start)
    ids = torch.randint(3, 320, shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) < 0.75) & (documents >= 0)
    batch: Any = type("Batch", (), {"spans": tuple(spans), "document_ids": documents})()
    none = torch.zeros((len(LENGTHS), 0), dtype=torch.int64, device=device)
    ids, positions, documents, mask = (tensor.to(device) for tensor in (ids, positions, documents, mask))
    return SlotBatch([], ids, positions, documents, mask, none, none.bool(), batch=batch)


def gradients(name: str, device: str, *, compiled: bool) -> tuple[float, dict[str, torch.Tensor]]:
    options = ModelOptions(config={**CONFIGS[name], "initializer_range": 0.1}, tokenizer="none")
    model = build_causal_lm(options, seed=1).to(device)
    lm = CausalLM(model, read_model_facts(options), options, compiled=compiled)
    terms = lm.loss(make_slot(device))
    terms.numerator.backward()
    return terms.numerator.item(), {n: p.grad.cpu() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_compiled_layers_have_the_gradients_of_the_cpu(name: str) -> None:
    """Forward and backward of flex_attention under our block masks, grouped key heads, windows and softcaps."""
    expected, reference = gradients(name, "cpu", compiled=False)
    loss, found = gradients(name, "cuda", compiled=True)
    assert loss == pytest.approx(expected, rel=1e-4)
    for parameter, gradient in reference.items():
        error = (found[parameter] - gradient).norm() / gradient.norm().clamp_min(1e-6)
        assert error < 1e-2, f"{parameter}: {error}"


def test_a_run_on_a_gpu_learns_what_a_run_on_a_cpu_does(tmp_path: Path) -> None:
    """Two stages with validation passes between; a recompilation would end it."""
    recipe = make_lm_world(tmp_path)
    config = json.dumps({**CONFIGS["llama"], "max_position_embeddings": 256, "tie_word_embeddings": True})
    overrides = [f"model.config={config}", "data.seq_len=128", "train.compute_dtype=float32"]
    losses = {}
    on_cpu = make_lm_world_plan(recipe, *overrides, f"run.dir={tmp_path / 'cpu'}")
    on_gpu = make_lm_plan(load_lm(recipe, *overrides, f"run.dir={tmp_path / 'gpu'}"), read_machine())
    assert on_gpu.trainer_devices[0].startswith("cuda")
    for name, plan in (("cpu", on_cpu), ("gpu", replace(on_gpu, world=on_cpu.world))):
        assert run_training(plan).finished
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [v for line in lines for k, v in line.items() if k in ("train/loss", "val/loss")]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=2e-3)
    result = run_lm_validation(on_gpu)
    assert all(proof.passed for proof in result.proofs), result.proofs


def test_bfloat16_reports_the_share_of_the_gpu_that_it_uses(tmp_path: Path) -> None:
    recipe = make_lm_world(tmp_path)
    config = json.dumps({**CONFIGS["llama"], "max_position_embeddings": 256})
    overrides = [f"model.config={config}", "data.seq_len=128", "validation.prompts=[one]"]
    assert run_training(make_lm_plan(load_lm(recipe, *overrides), read_machine())).finished
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = [line["perf/mfu"] for line in lines if "perf/mfu" in line]
    assert shares and all(0 < share < 1 for share in shares)
    assert (tmp_path / "run" / "samples.jsonl").is_file()
