"""Proofs 1 to 4 on real Gemma 3 270M in float32, and what `init` and other people's code make of it. Local only.

The target is made by `scripts/judge --gemma` from packages under Gemma's terms; without it these tests skip.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.losslessness import compare_greedy
from helixctl.decoding.speculative import decode_plain, decode_speculative
from helixctl.models.target import Target
from helixctl.models.tokenizer import load_tokenizer
from helixctl.plan import Plan
from helixctl.training import proofs
from helixctl.training.build import build_drafter, load_target
from helixctl.training.live import make_policy
from tests.conftest import ROOT
from tests.training.worlds import make_world_plan

pytestmark = pytest.mark.slow
FOLDER = ROOT / "demo" / "gemma3"
TEXTS = ["The capital of France is", "def fibonacci(n):\n    if n < 2:\n"]
RECIPE = """
run: {{dir: run}}
target: {{model: {target}, dtype: float32}}
data: {{train: [{{path: train.jsonl, format: text}}], store: store, seq_len: 64}}
drafter:
  algorithm: dflash
  num_layers: 1
  target_layer_ids: [1, 8, 15]
  block_size: 4
  num_anchors: 4
  mask_token_id: 262143
train: {{steps: 1}}
"""


@dataclass(frozen=True)
class Real:
    """The target, a random drafter for it, and what both are asked."""

    plan: Plan
    target: Target
    model: nn.Module
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    if not (FOLDER / "target" / "config.json").is_file():
        pytest.skip("no demo/gemma3/target: run scripts/judge --gemma once")
    folder = tmp_path_factory.mktemp("gemma3")
    (folder / "train.jsonl").write_text("")
    (folder / "recipe.yaml").write_text(RECIPE.format(target=FOLDER / "target"))
    plan = make_world_plan(folder / "recipe.yaml")
    tokenizer: Any = load_tokenizer(plan.recipe.target)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    return Real(plan, load_target(plan, "cpu"), build_drafter(plan, torch.device("cpu")), prompts)


def test_facts_of_the_real_configuration(real: Real) -> None:
    facts = real.target.facts
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (18, 640, 262144)
    assert facts.tie_word_embeddings and real.target.shared.head is real.target.shared.embedding
    assert real.target.shared.embedding_scale == pytest.approx(640**0.5, rel=1e-3)


def test_proofs_on_the_real_weights(real: Real) -> None:
    ids = [*real.prompts[0], *real.prompts[1]]
    found = proofs.prove(real.plan, real.model, real.target, (ids, [i >= 4 for i in range(len(ids))]), None)
    assert [proof.passed for proof in found] == [True, True, True], found


def test_greedy_output_is_the_targets_own_and_makes_sense(real: Real) -> None:
    options = DecodeOptions(max_new_tokens=4, record_margins=True)
    plain = decode_plain(real.target, real.prompts, options)
    drafted = decode_speculative(
        real.target, make_policy(real.plan, real.model, real.target.shared), real.prompts, options
    )
    assert compare_greedy(plain, drafted, noise=0.0).identical == len(TEXTS)
    tokenizer: Any = load_tokenizer(real.plan.recipe.target)
    assert "capital" in tokenizer.decode(plain[0].tokens)  # it is a small model


def test_z_lab_computes_the_same(tmp_path: Path) -> None:
    if not (ROOT / ".venv-judge-zlab" / ".judge-stamp").exists() or not (FOLDER / "export" / "config.json").is_file():
        pytest.skip("no export of a drafter for Gemma, or no .venv-judge-zlab: run scripts/judge --gemma once")
    places = [
        "--target",
        str(FOLDER / "target"),
        "--export",
        str(FOLDER / "export"),
        "--json",
        str(tmp_path / "j.json"),
    ]
    command = ["bash", "scripts/judge", "--num-prompts", "1", "--max-new-tokens", "8", *places]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(verdict["equal"] for verdict in json.loads((tmp_path / "j.json").read_text())["verdicts"])
