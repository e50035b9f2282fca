"""Converting between published formats: tensors stay as they are, and what a format needs is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helixctl.checkpoint.check import check_published
from helixctl.checkpoint.convert import convert
from helixctl.errors import CheckpointError, UsageError
from tests.checkpoint.builders import edit_config, export_to, make_facts
from tests.cli.runner import Runner


def same_tensors(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def test_there_and_back_is_the_same_folder(tmp_path: Path) -> None:
    source = export_to(tmp_path / "zlab")
    there = convert(source, tmp_path / "there", "speculators", target="org/target-8b", facts=make_facts())
    back = convert(there.dir, tmp_path / "back", "zlab", facts=make_facts())
    assert same_tensors(source, there.dir) and same_tensors(source, back.dir)
    assert config_of(back.dir) == config_of(source)
    assert config_of(there.dir) == config_of(export_to(tmp_path / "direct", "speculators"))
    assert there.commands == {"vLLM": f"vllm serve {there.dir}"}
    assert "base_model: org/target-8b" in (there.dir / "README.md").read_text()


def test_a_checkpoint_of_another_trainer_becomes_one_that_engines_read(tmp_path: Path) -> None:
    """TorchSpec's names, half precision, keys in one place only, a copy of the target's table."""
    source = export_to(tmp_path / "theirs")
    tensors = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["context_proj.weight"], tensors["embed_tokens.weight"] = (
        tensors.pop("fc.weight"),
        torch.zeros(100, 32).half(),
    )
    save_file(tensors, source / "model.safetensors")
    edit_config(source, block_size=None, rope_parameters=None, dtype="float16")
    assert not any(view.reads for view in check_published(source).engines)
    result = convert(source, tmp_path / "out", "zlab")
    assert all(view.reads for view in check_published(result.dir).engines)
    written = load_file(result.dir / "model.safetensors")
    assert torch.equal(written["fc.weight"], tensors["context_proj.weight"])
    assert config_of(result.dir)["dtype"] == "float16"
    assert "embed_tokens.weight" not in written


def test_what_a_format_needs_and_the_source_does_not_say_is_asked_for(tmp_path: Path) -> None:
    zlab, other = export_to(tmp_path / "a"), export_to(tmp_path / "b", "speculators")
    for source, name in ((zlab, "speculators"), (other, "zlab")):
        with pytest.raises(CheckpointError) as caught:
            convert(source, tmp_path / "out", name)
        assert "--target" in (caught.value.fix or "")
    with pytest.raises(CheckpointError, match="hidden_size is 32, the target's is 64"):
        convert(zlab, tmp_path / "out", "zlab", facts=make_facts(hidden_size=64))
    with pytest.raises(UsageError, match="over itself"):
        convert(zlab, zlab, "zlab")
    assert not (tmp_path / "out").exists()


def test_a_drafter_of_mixed_types_is_refused(tmp_path: Path) -> None:
    source = export_to(tmp_path / "a")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"].float()}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="bfloat16, float32"):
        convert(source, tmp_path / "out", "zlab")


def test_the_command(tmp_path: Path, run: Runner) -> None:
    source = export_to(tmp_path / "a", "speculators")
    done = run("convert", source, tmp_path / "out", "--format", "zlb")
    assert done.code == 2 and "zlab" in done.err
    done = run("convert", source, tmp_path / "out")
    assert done.code == 1 and "--target" in done.err
