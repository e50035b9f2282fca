"""The script that compares our answering with plain generate, on a tiny model: both give the same answers."""

from __future__ import annotations

import json
import sys

from scripts import regenerate_benchmark
from tests.data import templates
from tests.tiny import save_tiny, tiny_llama


def test_both_give_the_same_answers_in_float32(tmp_path, monkeypatch, capsys):
    tokenizer = templates.byte_tokenizer(templates.CHATML)
    folder = save_tiny(tiny_llama(vocab_size=len(tokenizer)), tmp_path / "model")
    tokenizer.save_pretrained(folder)
    words = ["--num-prompts", "6", "--batch-size", "4", "--max-new-tokens", "8", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["regenerate_benchmark", str(folder), *words])
    regenerate_benchmark.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["identical"] == found["prompts"] == 6
    assert found["ours"]["tokens"] == found["generate"]["tokens"] > 0
    assert found["ratio"] > 0
