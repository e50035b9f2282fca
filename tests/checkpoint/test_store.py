"""Checkpoints: bit-equal, whole or absent, and never the wrong one."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import Tensor

from helixctl.checkpoint import atomic, store
from helixctl.errors import CheckpointError

STATE = {"next_seq": 12, "fingerprints": {"target": "abc"}, "best": None, "lr": 0.0006}


def sample_tensors(seed: int = 0) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "drafter": {"fc.weight": weight, "norm.weight": torch.tensor([1.0, float("nan"), -0.0])},
        "optimizer": {
            "step": torch.tensor(7.0),
            "exp_avg": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
            "count": torch.tensor([2**62 + 1, -1]),
            "transposed": weight.t(),
            "same_memory": weight,
            "slice": torch.arange(10)[3:6],
            "empty": torch.zeros(0, 4),
            "rng": torch.arange(16, dtype=torch.uint8),
        },
    }


def bits(tensor: Tensor) -> tuple[Any, ...]:
    flat = tensor.contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).tolist() if flat.numel() else []


def save(root: Path, *steps: int) -> list[Path]:
    return [store.save_checkpoint(root, step, sample_tensors(step), STATE) for step in steps]


def files_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_round_trip_is_bitwise_equal(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 100)
    loaded = store.load_checkpoint(path)
    assert path.name == "step-00000100"
    assert (loaded.step, loaded.state) == (100, STATE)
    expected = sample_tensors(100)
    assert {f: set(named) for f, named in loaded.tensors.items()} == {f: set(named) for f, named in expected.items()}
    for file, named in expected.items():
        for name, tensor in named.items():
            assert bits(loaded.tensors[file][name]) == bits(tensor), name


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.bool, torch.uint8]),
    seed=st.integers(0, 1000),
)
def test_any_tensor_survives(
    shape: list[int], dtype: torch.dtype, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("any")
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10).to(dtype)
    path = store.save_checkpoint(root, 1, {"t": {"x": tensor}}, {})
    assert bits(store.load_checkpoint(path).tensors["t"]["x"]) == bits(tensor)


def test_nothing_but_safetensors_and_json_is_written(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 3)
    assert sorted(p.suffix for p in path.iterdir()) == [".json", ".json", ".safetensors", ".safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("file", ["drafter.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "extend"])
def test_damage_is_found_reported_and_skipped(tmp_path: Path, file: str, damage: str) -> None:
    good, torn = save(tmp_path, 10, 20)
    target = torn / file
    content = target.read_bytes()
    half = len(content) // 2
    if damage == "delete":
        target.unlink()
    else:
        flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        target.write_bytes({"truncate": content[:half], "flip": flipped, "extend": content + b"x"}[damage])
    with pytest.raises(CheckpointError, match=file) as caught:
        store.load_checkpoint(torn)
    assert caught.value.fix
    latest = store.latest_checkpoint(tmp_path)
    assert (latest.path, latest.step) == (good, 10)
    assert [s.path for s in latest.skipped] == [torn]
    assert file in latest.skipped[0].reason


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        "{",
        "[]",
        '{"format": "other"}',
        '{"format": "helixctl-checkpoint", "version": 99}',
        "drop files",
        "escape",
    ],
)
def test_foreign_folders_are_never_picked_up(tmp_path: Path, manifest: str | None) -> None:
    good, other = save(tmp_path, 1, 2)
    file = other / "manifest.json"
    content = json.loads(file.read_text())
    if manifest == "drop files":
        content["files"] = {}
        manifest = json.dumps(content)
    elif manifest == "escape":
        content["files"]["../step-00000001/state.json"] = content["files"]["state.json"]
        manifest = json.dumps(content)
    file.unlink()
    if manifest is not None:
        file.write_text(manifest)
    latest = store.latest_checkpoint(tmp_path)
    assert latest.path == good
    assert len(latest.skipped) == 1
    with pytest.raises(CheckpointError):
        store.load_checkpoint(other)


def test_renamed_to_another_step_is_refused(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 5)
    path.rename(tmp_path / "step-00000050")
    assert store.latest_checkpoint(tmp_path).path is None
    (tmp_path / "step-00000050").rename(tmp_path / "copied-elsewhere")
    assert store.load_checkpoint(tmp_path / "copied-elsewhere").step == 5


def test_an_absent_root_has_no_checkpoints(tmp_path: Path) -> None:
    assert store.latest_checkpoint(tmp_path / "none") == store.Latest(None, None, ())
    assert store.remove_leftovers(tmp_path / "none") == ()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        store.load_checkpoint(tmp_path / "none")


CRASH_POINTS = ["mkdir", "save_file", "write_text", "sync_tree", "_put_in_place"]


class Killed(BaseException):
    """Stands for kill -9: nothing may run after it, so clean-up is switched off too."""


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_crash_at_any_point_leaves_earlier_ones_and_a_removable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    save(tmp_path, 1, 2)
    before = files_of(tmp_path)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    owner: Any = {"mkdir": Path, "write_text": Path, "save_file": store}.get(point, atomic)
    with monkeypatch.context() as patch:
        patch.setattr(owner, point, kill)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            save(tmp_path, 3)
    assert store.latest_checkpoint(tmp_path).step == 2
    removed = store.remove_leftovers(tmp_path)
    assert len(removed) == (0 if point == "mkdir" else 1)
    assert files_of(tmp_path) == before
    save(tmp_path, 3)
    assert store.latest_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize("exchange", [True, False])
def test_saving_a_step_again_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    save(tmp_path, 4)
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    store.save_checkpoint(tmp_path, 4, sample_tensors(9), {"again": True})
    assert store.load_checkpoint(tmp_path / "step-00000004").state == {"again": True}
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_a_crash_between_two_renames_is_put_back(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 4)
    path.rename(tmp_path / ".replaced-step-00000004")
    assert store.latest_checkpoint(tmp_path).path is None
    assert store.remove_leftovers(tmp_path) == (".replaced-step-00000004",)
    assert store.load_checkpoint(path).step == 4


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 64, 4096])
def test_a_refused_write_is_explained_and_leaves_nothing(tmp_path: Path, limit: int) -> None:
    save(tmp_path, 1)
    before = files_of(tmp_path)
    big = {"drafter": {"w": torch.zeros(4096)}}
    with file_size_limit(limit), pytest.raises(CheckpointError, match=r"step-00000002: File too large") as caught:
        store.save_checkpoint(tmp_path, 2, big, STATE)
    assert "ulimit" in (caught.value.fix or "")
    assert files_of(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_is_explained_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save(tmp_path, 1)
    before = files_of(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else Path, call, full)
        with pytest.raises(CheckpointError, match="No space left") as caught:
            save(tmp_path, 2)
    assert "free space" in (caught.value.fix or "")
    assert files_of(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_an_error_number_inside_a_safetensors_message_is_understood() -> None:
    with pytest.raises(CheckpointError, match="No space left on device"), atomic.explained("cannot write x"):
        raise SafetensorError("I/O error: No space left on device (os error 28)")


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """No writing in ``folder``, also for root, who then acts as another user."""
    for parent in (folder, *folder.parents[:5]):
        if parent.stat().st_uid == os.getuid():
            parent.chmod(0o755)
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_a_read_only_folder_is_explained(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1)
    before = files_of(root)
    with read_only(root):
        with pytest.raises(CheckpointError, match=r"step-00000002: Permission denied") as caught:
            save(root, 2)
        with pytest.raises(CheckpointError, match=r"best\.json"):
            store.write_best(root, store.Best(1, "val/accept_len", 1.5))
    assert "writable" in (caught.value.fix or "")
    assert files_of(root) == before


def test_a_file_in_the_way_is_explained(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "root", 1)
    assert "in the way" in (caught.value.fix or "")


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5)
    assert store.prune(tmp_path, 2, 1) == (2, 3)
    assert [p.name for p in store.list_checkpoints(tmp_path)] == [f"step-{s:08d}" for s in (1, 4, 5)]
    assert store.prune(tmp_path, 2, 1) == ()


@settings(max_examples=12, deadline=None)
@given(
    damaged=st.sets(st.integers(1, 4)),
    keep_last=st.integers(0, 4),
    best=st.none() | st.integers(1, 4),
)
def test_prune_never_deletes_the_newest_good_or_the_best(
    damaged: set[int], keep_last: int, best: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("prune")
    for step in range(1, 5):
        path = store.save_checkpoint(root, step, {"t": {"x": torch.tensor(step)}}, {})
        if step in damaged:
            (path / "state.json").write_text("[]\n")  # same size as {}: only the checksum tells
    newest = store.latest_checkpoint(root).step
    store.prune(root, keep_last, best)
    left = {int(p.name[5:]) for p in store.list_checkpoints(root)}
    assert store.latest_checkpoint(root).step == newest
    assert best is None or best in left
    assert all(step in left for step in range(newest or 0, 5) if step > 0)


def test_prune_leaves_foreign_folders_alone(tmp_path: Path) -> None:
    save(tmp_path, 8, 9)
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "mine.txt").write_text("keep")
    (tmp_path / "notes").mkdir()
    assert store.prune(tmp_path, 1, None) == (8,)
    assert (tmp_path / "step-00000001" / "mine.txt").exists()


def test_best_pointer(tmp_path: Path) -> None:
    assert store.read_best(tmp_path) is None
    best = store.Best(40, "val/accept_len", 2.75)
    store.write_best(tmp_path, store.Best(20, "val/accept_len", 2.5))
    store.write_best(tmp_path, best)
    assert store.read_best(tmp_path) == best
    assert [p.name for p in tmp_path.iterdir()] == ["best.json"]
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json"):
        store.read_best(tmp_path)


def test_leftover_files_and_links_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".tmp-best.json-00").write_text("{")
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "step-00000001")
    assert store.remove_leftovers(tmp_path) == (".tmp-best.json-00", ".tmp-link")
    assert store.latest_checkpoint(tmp_path).step == 1
