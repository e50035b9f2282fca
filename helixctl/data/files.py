"""Reads source files piece by piece: lines, plain or gzip, rows of Parquet, whole texts; hashing what goes by."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from helixctl.data.records import Piece
from helixctl.data.tables import parquet_rows, row_piece
from helixctl.errors import DataError

_BUFFER_BYTES = 1 << 20
LINE_SUFFIXES = (".jsonl", ".json")
ROW_SUFFIXES = (".parquet",)
TEXT_SUFFIXES = (".txt", ".py")


@dataclass(frozen=True)
class Selection:
    """Which files of a folder are read."""

    whole_files: bool = False
    """A file that is neither JSONL nor Parquet is one document (the text format)."""
    include: tuple[str, ...] = ()
    """Patterns of names (`*.py`) or of paths below the folder; empty: by suffix."""
    exclude: tuple[str, ...] = ()
    """Patterns of names of files and folders, or of paths below the folder, that are left out."""

    def takes(self, relative: Path) -> bool:
        """Whether the file at this path below the folder is read."""
        if any(_matches(relative, pattern) for pattern in self.exclude):
            return False
        if self.include:
            return any(fnmatch(relative.name, pattern) or relative.match(pattern) for pattern in self.include)
        return _suffix(relative) in (*LINE_SUFFIXES, *ROW_SUFFIXES, *(TEXT_SUFFIXES if self.whole_files else ()))


class SourceReader:
    """Yields the pieces of a path; afterwards ``num_bytes`` and ``sha256`` tell what was read."""

    def __init__(self, path: Path, selection: Selection = Selection()) -> None:
        """``selection``: of a folder.

        Raises:
            DataError: nothing to read at ``path``.
        """
        self.files = _find_files(path, selection)
        self.total_bytes = sum(file.stat().st_size for file in self.files)
        self.num_bytes = 0
        """Bytes read so far, as stored."""
        self._is_folder = path.is_dir()
        self._whole_files = selection.whole_files
        self._hash = hashlib.sha256()

    @property
    def done_bytes(self) -> int:
        """Of ``total_bytes``."""
        return self.num_bytes

    @property
    def sha256(self) -> str:
        """Hash of everything read so far, files in order of their names: as stored, of Parquet the rows as JSON."""
        return self._hash.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """Documents in order; blank lines are none.

        Raises:
            DataError: a file cannot be read, is damaged, or holds nothing; no package for Parquet.
        """
        for file in self.files:
            found = False
            with _readable(file):
                for piece in self._rows(file) if _suffix(file) in ROW_SUFFIXES else self._split(file):
                    found = True
                    yield piece
            if not found:
                raise DataError(f"{file} is empty", fix="take it out of the recipe, or fill it")

    def _split(self, file: Path) -> Iterator[Piece]:
        with self._open(file) as stream:
            if self._whole_files and _suffix(file) not in LINE_SUFFIXES:
                raw = stream.read()
                if raw.strip() or self._is_folder:  # of many files some may be empty; they are counted
                    yield Piece(str(file), 0, raw)
                return
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield Piece(str(file), number, line)

    def _rows(self, file: Path) -> Iterator[Piece]:
        before, size = self.num_bytes, file.stat().st_size
        for number, (row, share) in enumerate(parquet_rows(file), start=1):
            piece = row_piece(str(file), number, row)
            self._hash.update(piece.raw)
            self.num_bytes = before + int(share * size)
            yield piece
        self.num_bytes = before + size

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


def _find_files(path: Path, selection: Selection) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"there is no file or folder {path}", fix="correct the source's path")
    found = sorted(file for file in path.rglob("*") if selection.takes(file.relative_to(path)) and file.is_file())
    if not found:
        suffixes = (*LINE_SUFFIXES, *ROW_SUFFIXES, *(TEXT_SUFFIXES if selection.whole_files else ()))
        wanted = f"ends in {' or '.join(suffixes)} (or that and .gz)"
        if selection.include:
            wanted = f"matches {' or '.join(selection.include)}"
        raise DataError(f"the folder {path} has no file that {wanted}")
    return found


def _matches(relative: Path, pattern: str) -> bool:
    return relative.match(pattern) or any(fnmatch(part, pattern) for part in relative.parts)


def _suffix(file: Path) -> str:
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file} is damaged: {error}", fix="fetch or write it again") from error
    except OSError as error:
        fix = "check the file and its permissions"
        raise DataError(f"{file} cannot be read: {error.strerror or error}", fix=fix) from error
