"""A whole small world for training tests: a random target on disk, a store, a recipe, a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from helixctl.data.fingerprint import describe_tokenizer
from helixctl.machine import Machine
from helixctl.plan import Plan, make_plan
from helixctl.recipe.load import load_recipe
from tests.data import templates
from tests.data.builders import write_store
from tests.tiny import save_tiny, tiny_llama

MACHINE = Machine(num_cpus=2, total_memory_bytes=8 << 30, gpus=(), has_bf16_cpu=False)

RECIPE = """
kind: drafter
run: {dir: run, seed: 3}
target: {model: target, dtype: float32}
data: {train: [{path: train.jsonl, format: tokens}], store: store, seq_len: 32}
drafter:
  algorithm: dflash
  num_layers: 2
  target_layer_ids: [0, 2]
  block_size: 4
  num_anchors: 6
  mask_token_id: 310
  loss: {decay_gamma: 4.0}
train: {steps: 6, micro_batch_rows: 1, learning_rate: 3.0e-3, log_every_steps: 2}
validation: {every_steps: 3, rows: 2, live_prompts: 0}
checkpoint: {every_steps: 2}
metrics: {sinks: [jsonl]}
"""


def make_world(
    folder: Path, train: Sequence[int] = (20, 25, 31, 12, 28, 18), validation: Sequence[int] = (20, 22)
) -> Path:
    """Write target with tokenizer, store and recipe into ``folder``; returns the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny(tiny_llama(vocab_size=320), folder / "target")
    tokenizer = templates.byte_tokenizer()
    tokenizer.save_pretrained(folder / "target")
    write_store(folder / "store", train, validation, info=describe_tokenizer(tokenizer))
    (folder / "train.jsonl").write_text("")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    return recipe


def make_world_plan(recipe: Path, *overrides: str) -> Plan:
    """The plan of a world's recipe on a small CPU machine."""
    return make_plan(load_recipe(recipe, overrides), MACHINE)


def tensors_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit-equality of two named sets of tensors."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
