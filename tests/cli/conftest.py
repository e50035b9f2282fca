"""A small target on disk, and a recipe for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixctl.plugins import DRAFTERS, plugin_names

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 320,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
TEXT = f"""\
run:
  dir: run
target:
  model: model
data:
  train:
    - path: a.jsonl
  store: store
  seq_len: 64
drafter:
  algorithm: {plugin_names(DRAFTERS)[0]}
  num_layers: 2
  block_size: 4
  num_anchors: 8
  mask_token_id: 310
train:
  steps: 100
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Folder of a target: its config.json only."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    """A recipe that plans."""
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path
