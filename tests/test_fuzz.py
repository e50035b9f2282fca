"""Anything at all as a recipe, a data file or a checkpoint's manifest: a result, or an error meant for users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helixctl.checkpoint.store import latest_checkpoint, load_checkpoint
from helixctl.errors import CheckpointError, DataError, RecipeError, UsageError
from helixctl.plugins import FORMATS, load_plugin, plugin_names
from helixctl.recipe.load import load_recipe
from helixctl.recipe.schema import SourceOptions
from tests.training.worlds import RECIPE

FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(
    [
        *("messages", "conversations", "role", "from", "content", "value", "tools", "tool_calls", "function", "name"),
        *("text", "input_ids", "loss_mask", "labels", "finish_reason", "arguments"),
    ]
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "", "human"])
ROWS = st.recursive(
    VALUES | ROLES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


def check_recipe(path: Path, overrides: tuple[str, ...] = ()) -> None:
    try:
        load_recipe(path, overrides)
    except RecipeError as error:
        assert error.problems
    except UsageError as error:
        assert error.message


@FUZZ
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_as_a_recipe(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "recipe.yaml").write_bytes(content)
    check_recipe(tmp_path / "recipe.yaml")


@FUZZ
@given(data=st.data(), value=VALUES)
def test_any_value_for_any_option(tmp_path: Path, data: st.DataObject, value: Any) -> None:
    lines = RECIPE.splitlines(keepends=True)
    place = data.draw(st.integers(0, len(lines) - 1))
    head = lines[place].split(":")[0]
    lines[place] = f"{head}: {json.dumps(value)}\n"
    (tmp_path / "recipe.yaml").write_text("".join(lines), encoding="utf-8")
    check_recipe(tmp_path / "recipe.yaml")


@FUZZ
@given(
    key=st.text(max_size=20) | st.sampled_from(["run.dir", "train", "data.train.0.path", "drafter.loss"]), value=VALUES
)
def test_any_override(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    check_recipe(tmp_path / "recipe.yaml", (f"{key}={json.dumps(value)}",))


@pytest.mark.parametrize("name", plugin_names(FORMATS))
@FUZZ
@given(rows=st.lists(ROWS.map(lambda row: json.dumps(row).encode()) | st.binary(max_size=60), max_size=4))
def test_any_lines_as_data(tmp_path: Path, name: str, rows: list[bytes]) -> None:
    path = tmp_path / ("data.txt" if name == "text" else "data.jsonl")
    path.write_bytes(b"\n".join(rows))
    try:
        for record in load_plugin(FORMATS, name).read(path, SourceOptions(path=path, format=name)):
            assert record.where.startswith(str(path))
    except DataError as error:
        assert error.message


MANIFEST_KEYS = st.sampled_from(["format", "version", "step", "files", "bytes", "sha256", "state.json", "../x", "a"])
MANIFESTS = st.recursive(
    VALUES | st.sampled_from(["helixctl-checkpoint", 1, 0, 3]),
    lambda inner: st.dictionaries(MANIFEST_KEYS, inner, max_size=5),
    max_leaves=15,
)


KNOWN = {"format": "helixctl-checkpoint", "version": 1, "step": 1}


@FUZZ
@given(manifest=MANIFESTS | MANIFESTS.map(lambda files: {**KNOWN, "files": files}), state=st.binary(max_size=40))
def test_any_manifest_of_a_checkpoint(tmp_path: Path, manifest: Any, state: bytes) -> None:
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (folder / "state.json").write_bytes(state)
    with pytest.raises(CheckpointError):
        load_checkpoint(folder)
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found.path is None and len(found.skipped) == 1
