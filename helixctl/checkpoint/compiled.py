"""Compiled code in one file that can be copied to another machine: a key that says what it is good for, and a folder.

    helixctl compile cache 1
    {"key": {...}, "sha256": "...", "bytes": ...}
    <tar.gz of the compiler's cache folder and of torch's own bundle>

Compilers' caches hold pickles and machine code. So a file is opened only if it belongs to this user and nobody else may
write to it, and nothing of it reaches the disk before its checksum matches. Never imports torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from helixctl.checkpoint.atomic import explained, sync, temporary_name
from helixctl.errors import CheckpointError

BUNDLE = "torch-cache.bin"
"""Torch's own bundle of artifacts, in the archive beside ``FOLDER``."""
FOLDER = "inductor"
"""The compiler's cache folder in the archive."""
SUFFIX = ".bin"
_MAGIC = b"helixctl compile cache 1\n"
_ROOT = 0
_LONGEST_HEADER = 1 << 20
_BLOCK = 1 << 20
_LEFT_OUT = ("locks", "tmp")
"""Parts of a cache folder that mean nothing elsewhere."""
_FIX = "make it again with `helixctl warmup-compile`"


@dataclass(frozen=True)
class CacheFile:
    """A file whose first lines have been read and whose owner is right; its content has not been looked at."""

    path: Path
    key: dict[str, Any]
    """What it was made for; see ``training.compile_key``."""
    sha256: str
    num_bytes: int
    """Of the content behind the header."""
    offset: int


def write_cache(path: Path, key: Mapping[str, Any], folder: Path, bundle: bytes) -> CacheFile:
    """Pack a compiler's cache ``folder`` and torch's ``bundle`` (may be empty) in one step, readable by this user only.

    Raises:
        CheckpointError: the disk is full or the place is not writable.
    """
    content, temporary = temporary_name(path), temporary_name(path)
    try:
        with explained(f"cannot write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            _pack(content, folder, bundle)
            header = {"key": key, "sha256": _sha256(content), "bytes": content.stat().st_size}
            with content.open("rb") as source, os.fdopen(_create(temporary), "wb") as file:
                file.write(_MAGIC + json.dumps(header, sort_keys=True).encode() + b"\n")
                for block in iter(lambda: source.read(_BLOCK), b""):
                    file.write(block)
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    finally:
        for leftover in (content, temporary):
            with suppress(OSError):
                leftover.unlink(missing_ok=True)
    return read_cache(path)


def read_cache(path: Path) -> CacheFile:
    """The header of a cache file.

    Raises:
        CheckpointError: there is none, it is another kind of file or torn, or it is not this user's alone.
    """
    with explained(f"cannot read {path}"), path.open("rb") as file:
        _refuse_strangers(path, os.fstat(file.fileno()))
        return _read_header(path, file)


def unpack_cache(cache: CacheFile, destination: Path) -> None:
    """Check the content and unpack it into the folder ``destination``, which must exist and be empty.

    Raises:
        CheckpointError: the content is torn or was changed; nothing has been unpacked then.
    """
    with explained(f"cannot read {cache.path}"), cache.path.open("rb") as file:
        _refuse_strangers(cache.path, os.fstat(file.fileno()))
        if _read_header(cache.path, file) != cache:
            raise CheckpointError(f"{cache.path} was replaced while it was read", fix="run the command again")
        digest, size = hashlib.sha256(), 0
        for block in iter(lambda: file.read(_BLOCK), b""):
            digest.update(block)
            size += len(block)
        if size != cache.num_bytes or digest.hexdigest() != cache.sha256:
            raise CheckpointError(f"{cache.path} is torn or was changed: its SHA-256 differs", fix=_FIX)
        file.seek(cache.offset)
        # A file name cannot lead out of the folder, and links are refused: the filter sees to both.
        try:
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                archive.extractall(destination, filter="data")
        except tarfile.TarError as error:
            raise CheckpointError(f"{cache.path} cannot be unpacked: {error}", fix=_FIX) from error


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _pack(path: Path, folder: Path, bundle: bytes) -> None:
    with os.fdopen(_create(path), "wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for source in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
            inside = source.relative_to(folder)
            if not any(part in _LEFT_OUT or part.startswith("tmp.") for part in inside.parts[:-1]):
                archive.add(source, arcname=f"{FOLDER}/{inside}", filter=_without_owner)
        bundle_info = tarfile.TarInfo(BUNDLE)
        bundle_info.size = len(bundle)
        archive.addfile(bundle_info, io.BytesIO(bundle))


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def _read_header(path: Path, file: BinaryIO) -> CacheFile:
    if file.readline(len(_MAGIC)) != _MAGIC:
        raise CheckpointError(f"{path} is no compile cache of this version of helixctl", fix=_FIX)
    line = file.readline(_LONGEST_HEADER)
    try:
        header = json.loads(line)
        key, sha256, num_bytes = dict(header["key"]), str(header["sha256"]), int(header["bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is torn: its header cannot be read", fix=_FIX) from error
    return CacheFile(path, key, sha256, num_bytes, file.tell())


def _refuse_strangers(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is no file", fix=_FIX)
    if status.st_uid not in (os.geteuid(), _ROOT):
        fix = "copy it yourself if you trust it: code in it runs with your rights"
        raise CheckpointError(f"{path} belongs to another user", fix=fix)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CheckpointError(f"{path} can be written by other users", fix=f"chmod go-w {path}, if you trust it")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(_BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()
