"""Exports: the published format, checked by a second implementation, and never in place of something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helixctl.checkpoint import export
from helixctl.checkpoint.export import export_drafter
from helixctl.errors import CheckpointError
from helixctl.models.drafters.dflash import plugin
from helixctl.models.drafters.dflash.formats import zlab
from helixctl.models.drafters.dflash.published import Published
from tests.checkpoint.builders import make_drafter, make_source


@pytest.mark.parametrize("facts", [{}, {"embedding_scale": 5.66, "logit_softcap": 30.0}, {"rope_theta": 1e6}])
def test_the_files_compute_what_the_drafter_computes(tmp_path: Path, facts: dict[str, Any]) -> None:
    source = make_source(**facts)
    result = export_drafter(make_drafter(source), source, tmp_path / "out")
    assert result.max_logit_diff < 1e-3
    assert (result.dir, result.tensors) == (tmp_path / "out", 3 + 11 * 2)
    assert result.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_every_tensor_is_the_rounded_master_and_the_dtype_field_is_true(tmp_path: Path) -> None:
    source = make_source()
    model = make_drafter(source)
    masters = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_drafter(model, source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert read.keys() == masters.keys()
    for name, tensor in read.items():
        assert str(tensor.dtype) == f"torch.{config['dtype']}"
        assert torch.equal(tensor, masters[name].to(torch.bfloat16)), name
    assert all(torch.equal(tensor, masters[name]) for name, tensor in model.state_dict().items())


def test_an_export_is_replaced_as_a_whole(tmp_path: Path) -> None:
    source = make_source()
    for seed in (0, 1):
        export_drafter(make_drafter(source, seed), source, tmp_path / "out")
    expected = plugin.export_state(make_drafter(source, 1))
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    source = make_source()
    (tmp_path / "out").mkdir()
    export_drafter(make_drafter(source), source, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.parametrize("kind", ["model", "documents", "file", "broken", "added"])
def test_anything_else_is_not_overwritten(tmp_path: Path, kind: str) -> None:
    source, out = make_source(), tmp_path / "out"
    if kind == "file":
        out.write_text("a file")
    elif kind == "added":
        export_drafter(make_drafter(source), source, out)
        (out / "tokenizer.json").write_text("{}")
    else:
        out.mkdir()
        content = {"model": '{"model_type": "llama"}', "broken": "{", "documents": "[]"}[kind]
        (out / "config.json").write_text(content)
    before = sorted(p.read_bytes() for p in (out.iterdir() if out.is_dir() else [out]))
    with pytest.raises(CheckpointError) as caught:
        export_drafter(make_drafter(source), source, out)
    assert "name a" in (caught.value.fix or "")
    assert sorted(p.read_bytes() for p in (out.iterdir() if out.is_dir() else [out])) == before


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    source = make_source()
    model = make_drafter(source)
    with torch.no_grad():
        model.get_parameter("norm.weight")[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        export_drafter(model, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


CONFIG_FAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}


@pytest.mark.parametrize("key", CONFIG_FAULTS)
def test_a_wrong_key_in_the_config_is_found_and_the_old_export_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    source = make_source()
    export_drafter(make_drafter(source), source, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    right = zlab.write

    def wrong(drafter: Published) -> dict[str, Any]:
        return right(drafter) | {key: CONFIG_FAULTS[key]}

    monkeypatch.setattr(zlab, "write", wrong)
    with pytest.raises((CheckpointError, RuntimeError)):
        export_drafter(make_drafter(source, 1), source, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_tensors_that_change_on_the_way_to_the_disk_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaging(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors | {"norm.weight": tensors["norm.weight"] * 2}, path, metadata)

    source = make_source()
    monkeypatch.setattr(export, "save_file", damaging)
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        export_drafter(make_drafter(source), source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_commands_count_as_the_engines_do(tmp_path: Path) -> None:
    source = make_source()
    commands = export_drafter(make_drafter(source), source, tmp_path / "my out").commands
    drafter = tmp_path / "my out"
    assert commands["vLLM"] == (
        "vllm serve org/target-8b --speculative-config "
        f"""'{{"method":"dflash","model":"{drafter}","num_speculative_tokens":4}}'"""
    )
    assert "--speculative-algorithm DFLASH" in commands["SGLang"]
    assert f"--speculative-draft-model-path '{drafter}'" in commands["SGLang"]
    assert commands["SGLang"].endswith("--speculative-num-draft-tokens 5")


def test_the_card_says_what_it_is(tmp_path: Path) -> None:
    source = make_source()
    export_drafter(make_drafter(source), source, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        "base_model: org/target-8b",
        "block size: 5",
        "1, 4",
        "mask token id: 7",
        "speculative-decoding",
        "| val/accept_len | 2.25 |",
    ):
        assert text in card
    assert str(tmp_path) not in card


def test_the_card_of_a_local_target_names_no_path(tmp_path: Path) -> None:
    (tmp_path / "local-target").mkdir()
    source = replace(make_source(), target=str(tmp_path / "local-target"))
    result = export_drafter(make_drafter(source), source, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "vllm serve local-target" in card
    assert f"vllm serve {tmp_path}" in result.commands["vLLM"]
