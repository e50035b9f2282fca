"""Targets with random weights in the shapes that docs/benchmarks.md compares, and documents of random tokens for them.

Speed does not depend on what the weights say. Nothing is downloaded, and no weights are written to disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helixctl.data.store import SourceCounts, TokenizerInfo
from helixctl.data.store_writer import StoreWriter
from helixctl.models import attention, loading
from helixctl.models.target import Target
from helixctl.plan import Plan
from helixctl.training import build as training


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model, and the micro-batch that it is measured with."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    rows: int
    seq_len: int
    anchors: int
    tied: bool = False
    drafter_layers: int = 5
    head_dim: int = 128


SHAPES = {
    "8b": Shape(4096, 12288, 36, 32, 8, 151936, rows=4, seq_len=3072, anchors=512),
    "8b-128": Shape(4096, 12288, 36, 32, 8, 151936, rows=4, seq_len=3072, anchors=128),
    "27b": Shape(5120, 17408, 64, 40, 8, 151936, rows=4, seq_len=3072, anchors=512),
    "0.6b": Shape(1024, 3072, 28, 16, 8, 151936, rows=4, seq_len=3072, anchors=128, tied=True),
    "0.6b-small": Shape(1024, 3072, 28, 16, 8, 151936, rows=1, seq_len=1024, anchors=64, tied=True),
    "135m": Shape(576, 1536, 30, 9, 3, 49152, rows=16, seq_len=2560, anchors=256, tied=True, head_dim=64),
    "tiny": Shape(64, 128, 6, 4, 2, 512, rows=2, seq_len=128, anchors=8, tied=True, drafter_layers=2, head_dim=16),
}


FAULT_AT = 6
"""Steps before the fault of a topology's case: the pipeline is full."""


NO_TOKENIZER = TokenizerInfo("a" * 64, "b" * 64, 0, 1, 0)


def write_recipe(
    shape: Shape, folder: Path, steps: int, mean_length: int | None, tokenizer: TokenizerInfo = NO_TOKENIZER
) -> Path:
    """Config of the target, store and recipe in ``folder``; returns the recipe's path.

    Args:
        shape: One of ``SHAPES``.
        folder: An empty folder.
        steps: Micro-batches that the run will train.
        mean_length: Of the documents, packed; None: every document fills a row.
        tokenizer: That the documents say they were made with.
    """
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(qwen3_config(shape)), encoding="utf-8")
    info = replace(tokenizer, vocab_size=shape.vocab)
    write_documents(shape, folder / "store", (steps + 2) * shape.rows, mean_length, info)
    recipe = {
        "kind": "drafter",
        "run": {"dir": str(folder / "run")},
        "target": {"model": str(folder / "target")},
        "data": {
            "train": [{"path": str(folder / "none.jsonl")}],
            "store": str(folder / "store"),
            "seq_len": shape.seq_len,
        },
        "drafter": {
            "algorithm": "dflash",
            "num_layers": shape.drafter_layers,
            "num_anchors": shape.anchors,
            "mask_token_id": 2,
        },
        "train": {"steps": steps, "micro_batch_rows": shape.rows},
        "validation": {"every_steps": 0},
        "metrics": {"sinks": []},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return path


def qwen3_config(shape: Shape) -> dict[str, Any]:
    """What config.json of such a model holds."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def write_documents(shape: Shape, path: Path, rows: int, mean_length: int | None, info: TokenizerInfo) -> None:
    """Fully supervised documents for at least ``rows`` rows."""
    rng = np.random.default_rng(0)
    wanted, written, number = rows * shape.seq_len * (1 if mean_length is None else 1.05), 0, 0
    with StoreWriter(path, info) as writer:
        while written < wanted:
            length = shape.seq_len
            if mean_length is not None:
                length = int(np.clip(rng.lognormal(np.log(mean_length) - 0.18, 0.6), 32, shape.seq_len))
            writer.add("train", rng.integers(3, shape.vocab, length), np.ones(length, bool))
            written, number = written + length, number + 1
        source = SourceCounts("memory", "tokens", 1.0, "train", "c" * 64, 1, number, number)
        writer.finish([source], mask_policy="all_turns", validation_fraction=0.0)


@contextmanager
def random_weights() -> Iterator[None]:
    """Targets are built from their configuration alone, straight on their GPU where there is one."""

    def build(options: Any, _facts: Any, dtype: torch.dtype) -> Any:
        import transformers

        attention.register()
        config = transformers.AutoConfig.from_pretrained(options.model)
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION
            )
        return model.eval().requires_grad_(False)

    def load(plan: Plan, device: str, dtype: str | None = None) -> Target:
        with torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
            return load_target(plan, device, dtype)

    original, load_target = loading.load_model, training.load_target
    loading.load_model = build  # type: ignore[assignment]  # the names of its parameters differ
    training.load_target = load
    try:
        yield
    finally:
        loading.load_model, training.load_target = original, load_target
