"""A tiny chat target with its tokenizer on disk, and conversations: what the command line needs from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helixctl.data.prepare import prepare
from helixctl.recipe.load import load_recipe
from tests.data import templates
from tests.tiny import save_tiny, tiny_llama

VOCAB_SIZE = 320
MASK_TOKEN = 310
"""A row of the embedding that no text uses: the tokenizer has 261 tokens."""
RECIPE = f"""\
run:
  dir: run
target:
  model: target
  dtype: float32
data:
  train:
    - path: data/train.jsonl
  validation:
    fraction: 0.2
  store: store
  seq_len: 64
  workers: 0
drafter:
  algorithm: dflash
  num_layers: 2
  target_layer_ids: [0, 2]
  block_size: 4
  num_anchors: 8
  mask_token_id: {MASK_TOKEN}
train:
  steps: 4
  learning_rate: 3.0e-3
  log_every_steps: 2
validation:
  every_steps: 2
  rows: 2
  live_prompts: 2
  max_new_tokens: 12
checkpoint:
  every_steps: 2
pipeline:
  threads: 1
metrics:
  sinks: [jsonl]
"""


def save_target(folder: Path, template: str | None = templates.CHATML) -> Path:
    """A random model of 4 layers and a tokenizer of one token per byte."""
    tokenizer = templates.byte_tokenizer(template)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save_tiny(tiny_llama(vocab_size=VOCAB_SIZE, **ids), folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversations(count: int) -> list[dict[str, Any]]:
    """Different short conversations of one turn."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"count to {i}"},
                {"role": "assistant", "content": f"one, two and so on to {i}."},
            ]
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_chat_world(folder: Path) -> Path:
    """Target, 40 conversations and a recipe in ``folder``; returns the recipe's path. Nothing is prepared yet."""
    save_target(folder / "target")
    write_jsonl(folder / "data" / "train.jsonl", conversations(40))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    return recipe


def prepare_world(recipe: Path) -> Path:
    """Prepare the recipe's store; returns the recipe."""
    prepare(load_recipe(recipe))
    return recipe
