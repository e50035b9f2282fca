"""Writes a store beside its final place and puts it there in one rename, so that nobody ever sees half a store."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from helixctl.data.anchors import first_anchor
from helixctl.data.store import (
    INDEX_TYPES,
    MANIFEST,
    PROMPTS,
    SPLITS,
    Manifest,
    SourceCounts,
    SplitCounts,
    SplitName,
    TokenizerInfo,
    is_store,
    old_path,
)
from helixctl.errors import DataError


class _File:
    """A file that knows its size and hash."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)
        self._num_bytes += len(content)

    def finish(self) -> tuple[int, str]:
        """Bring every byte to the disk; returns size and hash."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._num_bytes, self._hash.hexdigest()

    def close(self) -> None:
        with suppress(OSError):  # what is left in its buffer has no room on a full disk
            self._file.close()


class _SplitWriter:
    def __init__(self, folder: Path, token_type: type[np.generic]) -> None:
        folder.mkdir()
        self._name = folder.name
        self._token_type = token_type
        self.files = {name: _File(folder / f"{name}.bin") for name in ("tokens", "mask", *INDEX_TYPES)}
        self._end = 0
        self._documents = 0
        self._tokens = 0
        self._supervised = 0
        self._longest = 0

    def add(self, ids: NDArray[np.integer], mask: NDArray[np.bool_], copies: int) -> int:
        self.files["tokens"].write(ids.astype(self._token_type).tobytes())
        self.files["mask"].write(mask.tobytes())
        supervised = int(mask.sum())
        entry = {
            "starts": self._end,
            "lengths": ids.size,
            "supervised": supervised,
            "first_anchor": first_anchor(mask),
        }
        for name, value in entry.items():
            self.files[name].write(np.full(copies, value, INDEX_TYPES[name]).tobytes())
        first = self._documents
        self._end += ids.size
        self._documents += copies
        self._tokens += ids.size * copies
        self._supervised += supervised * copies
        self._longest = max(self._longest, ids.size)
        return first

    @property
    def counts(self) -> SplitCounts:
        return SplitCounts(self._documents, self._tokens, self._supervised, self._longest)


class StoreWriter:
    """Context manager: ``add`` documents, then ``finish``. Leaving it without ``finish`` leaves no trace.

    The store that ``path`` holds already is replaced only by a complete new one. Two writers for one path exclude
    each other. A write that fails (a full disk, no permission) is a DataError.
    """

    def __init__(self, path: Path, tokenizer: TokenizerInfo) -> None:
        self.path = path.absolute()
        self._tokenizer = tokenizer
        self._temp = self.path.with_name(f".{self.path.name}.tmp")
        self._lock: int | None = None
        self._prompts: _File | None = None
        self._placed = False
        self._splits: dict[SplitName, _SplitWriter] = {}

    def __enter__(self) -> StoreWriter:
        token_type = np.uint16 if self._tokenizer.vocab_size < 1 << 16 else np.uint32
        try:
            with self._writing():
                self._check_place()
                self._make_temp()
                self._prompts = _File(self._temp / PROMPTS)
                for name in SPLITS:
                    self._splits[name] = _SplitWriter(self._temp / name, token_type)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._discard()

    def add(self, split: SplitName, ids: NDArray[np.integer], mask: NDArray[np.bool_], *, copies: int = 1) -> int:
        """Append a document (ids [length], mask bool [length]) ``copies`` times; returns the index of the first.

        Raises:
            DataError: an id that is outside of the tokenizer's vocabulary.
        """
        if ids.shape != mask.shape or ids.ndim != 1:
            raise ValueError(f"ids {ids.shape} and mask {mask.shape} are not one document")
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self._tokenizer.vocab_size):
            text = f"a document has ids from {ids.min()} to {ids.max()}, the vocabulary ends at"
            raise DataError(f"{text} {self._tokenizer.vocab_size - 1}", fix="it was made with another tokenizer")
        with self._writing():
            return self._splits[split].add(ids, mask, copies)

    def add_prompt(self, prompt: Mapping[str, Any]) -> None:
        """Append one line of ``prompts.jsonl``."""
        with self._writing():
            assert self._prompts is not None, "add_prompt outside of the with block"
            self._prompts.write((json.dumps(prompt) + "\n").encode())

    def split_counts(self, split: SplitName) -> SplitCounts:
        """What was added so far."""
        return self._splits[split].counts

    def finish(self, sources: Iterable[SourceCounts], *, mask_policy: str, validation_fraction: float) -> Manifest:
        """Bring all to the disk and put the new store in its place; the old one is removed after that."""
        with self._writing():
            assert self._prompts is not None, "finish outside of the with block"
            files = {PROMPTS: self._prompts.finish()}
            for split, writer in self._splits.items():
                files.update({f"{split}/{name}.bin": file.finish() for name, file in writer.files.items()})
            splits: dict[str, SplitCounts] = {name: writer.counts for name, writer in self._splits.items()}
            manifest = Manifest(self._tokenizer, mask_policy, validation_fraction, tuple(sources), splits, files)
            content = _File(self._temp / MANIFEST)
            content.write((json.dumps(manifest.to_json(), indent=1) + "\n").encode())
            content.finish()
            for folder in (*(self._temp / name for name in SPLITS), self._temp):
                _sync_folder(folder)
            self._replace()
        return manifest

    def _check_place(self) -> None:
        old = old_path(self.path)
        if not self.path.exists() and is_store(old):
            old.rename(self.path)  # a prepare was killed between its two renames
        if self.path.exists() and not is_store(self.path) and (not self.path.is_dir() or any(self.path.iterdir())):
            raise DataError(
                f"{self.path} exists and is not a store; it will not be replaced",
                fix="give data.store another folder, or remove this one yourself",
            )

    def _make_temp(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._temp.mkdir()
        lock = os.open(self._temp, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise DataError(f"another prepare is writing {self.path}", fix="wait for it, or end it") from None
        self._lock = lock
        for entry in self._temp.iterdir():  # left by a writer that was killed
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _replace(self) -> None:
        old = old_path(self.path)
        if self.path.exists():
            if old.exists():
                shutil.rmtree(old)
            self.path.rename(old)
        try:
            self._temp.rename(self.path)
        except BaseException:
            if old.exists():
                old.rename(self.path)
            raise
        self._placed = True
        _sync_folder(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _discard(self) -> None:
        """Close everything and remove the temporary folder, if it still has its temporary name."""
        if self._lock is None:
            return
        for file in (self._prompts, *(file for writer in self._splits.values() for file in writer.files.values())):
            if file is not None:
                file.close()
        if not self._placed:
            shutil.rmtree(self._temp, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"the store {self.path} could not be written: {error.strerror or error}"
            raise DataError(
                f"{text}; what stood there is unchanged", fix="make room, or give data.store another folder"
            ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
