"""A target's facts, a drafter for it, and its export, all tiny and random."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helixctl.checkpoint.export import ExportSource, export_drafter
from helixctl.models.drafters.dflash import plugin
from helixctl.models.drafters.dflash.options import Options
from helixctl.models.facts import TargetFacts


def make_facts(**changes: Any) -> TargetFacts:
    values: dict[str, Any] = {
        "num_layers": 6,
        "hidden_size": 32,
        "vocab_size": 100,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "tie_word_embeddings": True,
        "model_type": "llama",
        "max_positions": 256,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "recurrent": False,
        "embedding_scale": 1.0,
        "logit_softcap": None,
        "architectures": ("LlamaForCausalLM",),
        "dtype": "float32",
        "bos_token_ids": (1,),
        "eos_token_ids": (2,),
        "pad_token_ids": (0,),
    }
    return TargetFacts(**values | changes)


def make_source(**facts: Any) -> ExportSource:
    options = Options(num_layers=2, block_size=5, mask_token_id=7)
    return ExportSource(options, make_facts(**facts), (1, 4), "org/target-8b", 300, {"val/accept_len": 2.25})


def make_drafter(source: ExportSource, seed: int = 0) -> nn.Module:
    """Random everywhere, norms too, and far from what bfloat16 can hold."""
    assert isinstance(source.options, Options)
    model = plugin.build(source.options, source.facts, source.taps, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def export_to(folder: Path, format_name: str = "zlab", **facts: Any) -> Path:
    """An export of a random drafter."""
    source = replace(make_source(**facts), format=format_name)
    export_drafter(make_drafter(source), source, folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json, dotted names reaching into sections; None takes a key away."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = config
        for section in sections:
            place = place[section]
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    path.write_text(json.dumps(config))
