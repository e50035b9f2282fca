"""Reads source files piece by piece: plain or gzip, single or a folder of them, hashing what goes by."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from helixctl.data.records import Piece
from helixctl.errors import DataError

_BUFFER_BYTES = 1 << 20
LINE_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt",)


class SourceReader:
    """Yields the pieces of a path; afterwards ``num_bytes`` and ``sha256`` tell what was read."""

    def __init__(self, path: Path, *, whole_files: bool = False) -> None:
        """``whole_files``: a file that is not JSONL is one document (the text format).

        Raises:
            DataError: nothing to read at ``path``.
        """
        self.files = _find_files(path, LINE_SUFFIXES + (TEXT_SUFFIXES if whole_files else ()))
        self.total_bytes = sum(file.stat().st_size for file in self.files)
        self.num_bytes = 0
        """Bytes read so far, as stored."""
        self._whole_files = whole_files
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hash of everything read so far, as stored, files in order of their names."""
        return self._hash.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """Documents in order; blank lines are none.

        Raises:
            DataError: a file cannot be read, is damaged, or holds nothing.
        """
        for file in self.files:
            found = False
            with _readable(file), self._open(file) as stream:
                for piece in self._split(file, stream):
                    found = True
                    yield piece
            if not found:
                raise DataError(f"{file} is empty", fix="take it out of the recipe, or fill it")

    def _split(self, file: Path, stream: BinaryIO) -> Iterator[Piece]:
        if self._whole_files and _suffix(file) not in LINE_SUFFIXES:
            raw = stream.read()
            if raw.strip():
                yield Piece(str(file), 0, raw)
            return
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield Piece(str(file), number, line)

    @contextmanager
    def _open(self, file: Path) -> Iterator[BinaryIO]:
        with file.open("rb", buffering=0) as raw:
            counted = io.BufferedReader(_Counting(raw, self), _BUFFER_BYTES)
            if file.suffix != ".gz":
                yield counted
                return
            with gzip.GzipFile(fileobj=counted) as unpacked, io.BufferedReader(unpacked, _BUFFER_BYTES) as stream:
                yield stream

    def _count(self, content: memoryview) -> None:
        self.num_bytes += len(content)
        self._hash.update(content)


class _Counting(io.RawIOBase):
    def __init__(self, raw: io.FileIO, reader: SourceReader) -> None:
        self._raw = raw
        self._reader = reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0
        self._reader._count(memoryview(buffer)[:count])
        return count


def parse_json(piece: Piece) -> Any:
    """The JSON value of a piece.

    Raises:
        DataError: it is not JSON; names file and line.
    """
    try:
        return json.loads(piece.raw.strip())
    except (ValueError, RecursionError) as error:
        fix = "one JSON object per line is wanted; correct or remove this line"
        # The decoder's own text counts lines too, and here there is one.
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"{piece.where}: not JSON: {reason}", fix=fix) from error


def _find_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"there is no file or folder {path}", fix="correct the source's path")
    found = sorted(file for file in path.rglob("*") if file.is_file() and _suffix(file) in suffixes)
    if not found:
        raise DataError(f"the folder {path} has no file that ends in {' or '.join(suffixes)} (or that and .gz)")
    return found


def _suffix(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file} is damaged: {error}", fix="fetch or write it again") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
