"""Features on disk: the same bits as online, whole or not at all after any kill, and refused where they do not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from helixctl.checkpoint.store import load_checkpoint
from helixctl.data.store import Store
from helixctl.data.stored_features import MANIFEST
from helixctl.errors import DataError, Interrupted, RecipeError, StageFailed, UsageError
from helixctl.machine import read_machine
from helixctl.models.target import Target
from helixctl.plan import make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training import capture as capture_module
from helixctl.training.build import load_target, make_loader
from helixctl.training.capture import Capture, run_capture, split_rows
from helixctl.training.feature_cache import CachedFeatures
from helixctl.training.run import run_training
from helixctl.training.stored import StoredFeatures, feature_key
from helixctl.training.wiring import make_sequence
from tests.conftest import ROOT
from tests.data.builders import write_store
from tests.tiny import save_tiny, tiny_llama
from tests.training.capture_child import SHARD_BYTES
from tests.training.worlds import make_world, make_world_plan, tensors_equal

LENGTHS = (20, 25, 31, 12, 28, 18, 40)
"""Of the training documents; rows, and so documents, are cut at 32."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_world(tmp_path, LENGTHS)


def store_features(recipe: Path, name: str = "features", *overrides: str, shard_bytes: int = SHARD_BYTES) -> Any:
    return run_capture(Capture(make_world_plan(recipe, *overrides), recipe.parent / name, shard_bytes=shard_bytes))


def train(recipe: Path, name: str, *overrides: str, resume: bool = False) -> Any:
    run_training(make_world_plan(recipe, f"run.dir={recipe.parent / name}", *overrides), resume=resume)
    return load_checkpoint(recipe.parent / name / "checkpoints" / "step-00000006").tensors


def same(one: Any, other: Any) -> bool:
    return all(tensors_equal(one[part], other[part]) for part in ("drafter", "optimizer"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_from_disk_gives_the_parameters_of_training_online_bit_for_bit(
    recipe: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (f"target.dtype={dtype}", "drafter.init_layers=[0, 1]")
    result = store_features(recipe, "features", *options)
    assert result.shards > 2 and result.written == result.shards and result.documents == len(LENGTHS) + 2
    online = train(recipe, "online", "target.feature_cache_mib=64", *options)
    monkeypatch.setattr(Target, "features", lambda *args, **options: pytest.fail("the target ran"))
    offline = train(recipe, "offline", f"target.features={recipe.parent / 'features'}", *options)
    assert same(online, offline)


def test_several_readers_and_drafters_change_nothing_either(recipe: Path) -> None:
    store_features(recipe)
    features = f"target.features={recipe.parent / 'features'}"
    split = ("pipeline.drafters=[cpu, cpu]", "validation.rows=2")
    one = train(recipe, "one", features, "train.grad_accum_steps=1", *split)
    many = train(recipe, "many", features, "pipeline.targets=[cpu, cpu, cpu]", "pipeline.readers=2", *split)
    assert same(one, many)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_go_together_where_a_run_compiles_and_differ_in_rounding_only(
    recipe: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU `target.compile: on` says so; features are computed without compiling all the same."""
    original, rows = Target.features, []

    def features(self: Target, batch: Any, **options: Any) -> Any:
        rows.append([end - start for start, end in batch.spans[0]])
        return original(self, batch, **options)

    monkeypatch.setattr(Target, "features", features)
    options = (f"target.dtype={dtype}", "train.micro_batch_rows=2")
    alone = store_features(recipe, "alone", *options, shard_bytes=1 << 20)
    assert all(len(row) == 1 for row in rows) and len(rows) == alone.documents
    rows.clear()
    together = store_features(recipe, "together", *options, "target.compile=on", shard_bytes=1 << 20)
    assert [sum(row) for row in rows] == [45, 43, 46, 32, 42] and (alone.documents, alone.tokens) == (
        together.documents,
        together.tokens,
    )
    for name in ("train-00000.safetensors", "validation-00000.safetensors"):
        one, other = (load_file(recipe.parent / folder / name) for folder in ("alone", "together"))
        del one["checksums"], other["checksums"]
        for layer, expected in one.items():
            torch.testing.assert_close(other[layer], expected, rtol=2e-2, atol=2e-2 if dtype == "bfloat16" else 1e-5)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 100))
def test_rows_hold_all_documents_in_order_and_as_many_as_fit(lengths: list[int], most: int) -> None:
    rows = list(split_rows(lengths, most))
    assert [place for first, end in rows for place in range(first, end)] == list(range(len(lengths)))
    for (first, end), after in zip_longest(rows, rows[1:]):
        assert first < end and (end - first == 1 or sum(lengths[first:end]) <= most)
        assert after is None or sum(lengths[first : end + 1]) > most


def test_repeated_documents_are_stored_once(tmp_path: Path) -> None:
    recipe = make_world(tmp_path, (20, 25))
    before = store_features(recipe, "once")
    info = Store.open(tmp_path / "store").manifest.tokenizer
    write_store(tmp_path / "twice", (20, 25), (20, 22), info=info, copies=2)
    twice = store_features(recipe, "two", f"data.store={tmp_path / 'twice'}")
    assert (twice.documents, twice.tokens) == (before.documents, before.tokens)


def test_the_size_is_known_before_and_right(recipe: Path) -> None:
    forecast = Capture(make_world_plan(recipe), recipe.parent / "features", shard_bytes=SHARD_BYTES).forecast()
    tokens = sum(min(length, 32) for length in LENGTHS) + 20 + 22
    assert forecast.tokens == tokens and forecast.num_bytes == tokens * 2 * 32 * 4 == forecast.missing_bytes
    assert not (recipe.parent / "features").exists()
    written = store_features(recipe)
    assert forecast.num_bytes < written.num_bytes < forecast.num_bytes + 400 * written.shards


def test_a_disk_without_room_is_refused_before_anything_is_loaded(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UsageError, match=r"MiB in .*features, its disk has 0.0 MiB free"):
        store_features(recipe)
    assert not (recipe.parent / "features").exists()


def test_after_kill_9_it_goes_on_and_ends_with_the_same_files(recipe: Path) -> None:
    """The process dies at the sixth of nine documents; a torn temporary file is left as well."""
    store_features(recipe, "whole")
    words = [sys.executable, "-m", "tests.training.capture_child", str(recipe), "5"]
    killed = subprocess.run(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = recipe.parent / "features"
    (folder / ".tmp-train-00001.safetensors-12345678").write_bytes(b"torn")
    left = {path.name for path in folder.glob("*.safetensors")}
    assert left and not json.loads((folder / MANIFEST).read_text())["complete"]
    with pytest.raises(RecipeError, match="not complete"):
        make_world_plan(recipe, f"target.features={folder}")
    result = store_features(recipe)
    assert result.written == result.shards - len(left)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (recipe.parent / "whole").iterdir()}


def test_ctrl_c_keeps_whole_shards_and_the_next_run_goes_on(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Target.features, iter(range(1000))

    def features(self: Target, batch: Any, **options: Any) -> Any:
        if next(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, batch, **options)

    monkeypatch.setattr(Target, "features", features)
    with pytest.raises(Interrupted, match="SIGINT") as stopped:
        store_features(recipe)
    assert stopped.value.exit_code == 130 and "same command" in str(stopped.value)
    result = store_features(recipe)
    assert 0 < result.written < result.shards


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["drafter.target_layer_ids=[0, 1]"], r"taps \(0, 2\) instead of \(0, 1\)"),
        (["target.dtype=bfloat16"], "dtype float32 instead of bfloat16"),
        (["data.seq_len=33"], "documents cut at 32 tokens, data.seq_len is 33"),
        (["data.store=other"], "another data"),
        (["target.quantization=fp8"], r"another target\.quantization"),
        (["target.model=wider"], "another target"),
    ],
)
def test_features_of_something_else_are_refused_by_the_plan(recipe: Path, overrides: list[str], named: str) -> None:
    store_features(recipe)
    folder = recipe.parent
    write_store(folder / "other", LENGTHS, (20,), info=Store.open(folder / "store").manifest.tokenizer)
    save_tiny(tiny_llama(vocab_size=320, rms_norm_eps=1e-3), folder / "wider")
    (folder / "wider" / "tokenizer.json").write_bytes((folder / "target" / "tokenizer.json").read_bytes())
    moved = [word.replace("=other", f"={folder}/other").replace("=wider", f"={folder}/wider") for word in overrides]
    with pytest.raises(RecipeError, match=named) as refused:
        make_world_plan(recipe, f"target.features={folder / 'features'}", *moved)
    assert "target.features" in str(refused.value) and "prepare RECIPE --features" in str(refused.value)
    if "wider" not in moved[0]:  # its tokenizer is refused before
        with pytest.raises(DataError, match="holds features of something else"):
            Capture(make_world_plan(recipe, *moved), folder / "features")


def test_other_weights_of_the_same_configuration_are_refused(recipe: Path) -> None:
    store_features(recipe)
    save_tiny(tiny_llama(seed=1, vocab_size=320), recipe.parent / "target")
    with pytest.raises(StageFailed, match="another target: its weights differ"):
        train(recipe, "run", f"target.features={recipe.parent / 'features'}")
    (recipe.parent / "features" / "train-00000.safetensors").unlink()
    with pytest.raises(StageFailed, match="its weights differ"):
        store_features(recipe)


def test_shorter_rows_read_the_beginnings_of_documents(recipe: Path) -> None:
    store_features(recipe)
    train(recipe, "short", f"target.features={recipe.parent / 'features'}", "data.seq_len=24")


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_torn_shard_is_named_before_training(recipe: Path, damage: str) -> None:
    store_features(recipe)
    shard = recipe.parent / "features" / "train-00001.safetensors"
    content = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(content[:-10])
    named = "is missing" if damage == "missing" else f"has {len(content) - 10} bytes instead of {len(content)}"
    with pytest.raises(RecipeError, match=f"torn: train-00001.safetensors {named}"):
        make_world_plan(recipe, f"target.features={recipe.parent / 'features'}")
    assert store_features(recipe).written == 1
    assert shard.read_bytes() == content


def test_a_changed_byte_ends_the_run_and_prepare_mends_it(recipe: Path) -> None:
    store_features(recipe)
    shard = recipe.parent / "features" / "train-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:])
    with pytest.raises(StageFailed, match=r"train-00001.safetensors is damaged: the features of train document"):
        train(recipe, "run", f"target.features={recipe.parent / 'features'}")
    assert store_features(recipe).written == 1
    assert shard.read_bytes() == content


def test_shards_of_another_folder_are_written_anew(recipe: Path) -> None:
    store_features(recipe)
    shard = recipe.parent / "features" / "train-00000.safetensors"
    content = shard.read_bytes()
    save_file(load_file(shard), shard, {"key": "another"})
    assert store_features(recipe).written == 1
    assert shard.read_bytes() == content


def test_two_at_once_are_refused(recipe: Path) -> None:
    capture = Capture(make_world_plan(recipe), recipe.parent / "features")
    with capture_module._locked(capture.folder), pytest.raises(DataError, match="another prepare writes"):
        run_capture(capture)


def test_a_folder_of_other_things_is_left_alone(recipe: Path) -> None:
    with pytest.raises(DataError, match="is not a folder of features"):
        store_features(recipe, "store")


@pytest.mark.gpu
def test_on_a_gpu_stored_features_are_those_of_the_target_there(recipe: Path) -> None:
    options = ("target.dtype=bfloat16", "target.attention=segments", "pipeline.targets=[cuda:0]")
    plan = make_plan(load_recipe(recipe, options), read_machine())
    run_capture(Capture(plan, recipe.parent / "features", shard_bytes=SHARD_BYTES))
    words = (*options, f"target.features={recipe.parent / 'features'}")
    offline = make_plan(load_recipe(recipe, words), read_machine())
    store, device = Store.open(recipe.parent / "store"), torch.device("cuda:0")
    stored = StoredFeatures(recipe.parent / "features", feature_key(offline, store), store, device)
    live = CachedFeatures(load_target(plan, "cuda:0"), 1 << 20)
    loader = make_loader(plan, store, make_sequence(plan))
    for seq in range(4):
        batch = loader.batch(seq)
        for one, other in zip(stored.features(batch), live.features(batch), strict=True):
            assert one.device == other.device and torch.equal(one, other)
    assert run_training(offline).finished


@pytest.mark.gpu
def test_on_a_gpu_documents_that_go_together_have_the_features_of_documents_alone(recipe: Path) -> None:
    found = []
    for name, words in (("together", ()), ("alone", ("target.attention=segments",))):
        options = ("target.dtype=float32", "train.micro_batch_rows=4", "pipeline.targets=[cuda:0]", *words)
        plan = make_plan(load_recipe(recipe, options), read_machine())
        run_capture(Capture(plan, recipe.parent / name, shard_bytes=1 << 20))
        found.append(load_file(recipe.parent / name / "train-00000.safetensors"))
    for layer in found[0].keys() - {"checksums"}:
        torch.testing.assert_close(found[0][layer], found[1][layer], rtol=1e-3, atol=1e-3)
