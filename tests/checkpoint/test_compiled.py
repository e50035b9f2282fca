"""A cache of compiled code in one file: whole or not at all, of this user, and nothing unpacked that was changed."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.checkpoint import compiled
from helixctl.checkpoint.compiled import BUNDLE, FOLDER, read_cache, unpack_cache, write_cache
from helixctl.errors import CheckpointError

KEY = {"torch": "2.13.0", "taps": [1, 2], "drafter.num_anchors": 8}


def fill(folder: Path) -> Path:
    """A compiler's cache folder: code, a lock, and a link that leads out of it."""
    for name in ("ab/kernel.so", "fxgraph/x/entry", "locks/a.lock", "triton/0/tmp.pid_1/half"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 100)
    (folder / "ab" / "link").symlink_to("/etc/passwd")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "out" / "cache.bin"
    write_cache(path, KEY, fill(tmp_path / "inductor"), b"bundle")
    return path


def unpacked(path: Path, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    unpack_cache(read_cache(path), folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_goes_in_comes_out(cache: Path, tmp_path: Path) -> None:
    assert read_cache(cache).key == KEY
    assert unpacked(cache, tmp_path / "new") == {
        f"{FOLDER}/ab/kernel.so": b"ab/kernel.so" * 100,
        f"{FOLDER}/fxgraph/x/entry": b"fxgraph/x/entry" * 100,
        BUNDLE: b"bundle",
    }


def test_readable_by_this_user_only_and_nothing_else_is_left(cache: Path) -> None:
    assert cache.stat().st_mode & 0o777 == 0o600
    assert list(cache.parent.iterdir()) == [cache]


@given(st.data())
def test_no_changed_byte_is_unpacked(tmp_path_factory, data) -> None:
    folder = tmp_path_factory.mktemp("torn")
    path = folder / "cache.bin"
    write_cache(path, KEY, fill(folder / "inductor"), b"bundle")
    content = bytearray(path.read_bytes())
    start = read_cache(path).offset
    place = data.draw(st.integers(start, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
    else:
        path.write_bytes(content[:place])
    (folder / "new").mkdir()
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        unpack_cache(read_cache(path), folder / "new")
    assert not any((folder / "new").iterdir())


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04", compiled._MAGIC, compiled._MAGIC + b"{}\n", compiled._MAGIC + b'{"key": 1', b"\x80\x04"],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cache.bin"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no compile cache|torn"):
        read_cache(path)


def test_what_others_may_write_is_refused(cache: Path) -> None:
    cache.chmod(0o620)
    with pytest.raises(CheckpointError, match="written by other users"):
        read_cache(cache)


def test_what_belongs_to_others_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.chmod(0o644)
    owner = os.stat(cache).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(compiled, "_ROOT", -1)
    with pytest.raises(CheckpointError, match="another user"):
        read_cache(cache)


def test_a_folder_is_no_cache(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_cache(tmp_path)


def test_names_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    """A file with a right checksum and a wrong name: made by hand, as no version of ours writes one."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../outside"), io.BytesIO(b""))
    content = tmp_path / "content"
    content.write_bytes(packed.getvalue())
    header = {"key": {}, "sha256": compiled._sha256(content), "bytes": len(packed.getvalue())}
    path = tmp_path / "cache.bin"
    path.write_bytes(compiled._MAGIC + json.dumps(header).encode() + b"\n" + packed.getvalue())
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match="cannot be unpacked"):
        unpack_cache(read_cache(path), tmp_path / "new")
    assert not (tmp_path / "outside").exists()


def test_a_write_that_fails_leaves_the_old_file(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.read_bytes()

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiled, "_pack", full)
    with pytest.raises(CheckpointError, match="space"):
        write_cache(cache, {"torch": "other"}, tmp_path / "inductor", b"")
    assert cache.read_bytes() == before
    assert list(cache.parent.iterdir()) == [cache]
