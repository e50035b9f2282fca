"""A small world for a causal LM: texts and chats in a prepared store, a tokenizer of bytes, a recipe, a plan."""

from __future__ import annotations

from pathlib import Path

from helixctl.data.prepare import prepare
from helixctl.lm_plan import CausalLMPlan, make_lm_plan
from helixctl.machine import Machine
from helixctl.recipe.causal_lm import CausalLMRecipe, data_sections
from helixctl.recipe.load import load_any_recipe
from tests.chats import conversations, write_jsonl
from tests.data import templates

MACHINE = Machine(num_cpus=2, total_memory_bytes=8 << 30, gpus=(), has_bf16_cpu=False)
VOCAB_SIZE = 320
"""The tokenizer has fewer."""
CONFIG = (
    "{model_type: llama, vocab_size: 320, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128, tie_word_embeddings: true}"
)
RECIPE = f"""\
kind: causal_lm
run: {{dir: run, seed: 3}}
model: {{tokenizer: tokenizer, config: {CONFIG}}}
data:
  train: [{{path: texts.jsonl, format: text}}]
  validation: {{fraction: 0.2}}
  store: store
  seq_len: 32
  workers: 0
stages:
  - {{steps: 4, learning_rate: 3.0e-3, warmup_ratio: 0.25}}
  - {{steps: 4, learning_rate: 1.0e-3, min_lr_ratio: 0.1}}
train: {{micro_batch_rows: 2, log_every_steps: 2}}
validation: {{every_steps: 3, rows: 3}}
checkpoint: {{every_steps: 2, keep_last: 9}}
pipeline: {{threads: 1}}
metrics: {{sinks: [jsonl]}}
"""
CHAT_STAGE = "stages.1.data={train: [{path: %s, format: chat}], store: %s}"


def make_lm_world(folder: Path) -> Path:
    """What ``write_lm_world`` writes, prepared; returns the recipe's path."""
    return prepare_lm_world(write_lm_world(folder))


def write_lm_world(folder: Path, name: str = "recipe.yaml") -> Path:
    """Tokenizer, texts, chats and a recipe called ``name`` in ``folder``; returns the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    templates.byte_tokenizer().save_pretrained(folder / "tokenizer")
    texts = [{"text": " ".join(f"{word} {i}" for word in ("one", "two", "three")[: 1 + i % 3])} for i in range(60)]
    write_jsonl(folder / "texts.jsonl", texts)
    write_jsonl(folder / "chats.jsonl", conversations(20))
    recipe = folder / name
    recipe.write_text(RECIPE, encoding="utf-8")
    return recipe


def prepare_lm_world(recipe: Path, *overrides: str) -> Path:
    """Make every store that the recipe needs; returns the recipe's path."""
    loaded = load_lm(recipe, *overrides)
    for data in data_sections(loaded):
        prepare(loaded.model_copy(update={"data": data}))
    return recipe


def load_lm(recipe: Path, *overrides: str) -> CausalLMRecipe:
    """The recipe, of this kind."""
    loaded = load_any_recipe(recipe, overrides)
    assert isinstance(loaded, CausalLMRecipe)
    return loaded


def make_lm_world_plan(recipe: Path, *overrides: str) -> CausalLMPlan:
    """The plan of a world's recipe on a small CPU machine."""
    return make_lm_plan(load_lm(recipe, *overrides), MACHINE)
