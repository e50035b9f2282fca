"""A recipe's source, whatever it is, as a reader of pieces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from helixctl.data.files import Selection, SourceReader
from helixctl.data.records import Piece
from helixctl.data.tables import DatasetReader
from helixctl.plugins import FORMATS, load_plugin
from helixctl.recipe.schema import SourceOptions


class Reader(Protocol):
    """Reads a source once, from its beginning."""

    total_bytes: int
    """Size of what is read; 0 where it is not known."""

    @property
    def done_bytes(self) -> int:
        """Of ``total_bytes``."""

    @property
    def num_bytes(self) -> int:
        """Bytes read so far."""

    @property
    def sha256(self) -> str:
        """Hash of what was read so far."""

    def pieces(self) -> Iterator[Piece]:
        """Documents in order."""
        ...


def open_source(options: SourceOptions) -> Reader:
    """The reader of a source.

    Raises:
        DataError: there is nothing at its place, or no package that reads it.
        UsageError: there is no such format.
    """
    if options.dataset is not None:
        return DatasetReader(options.dataset)
    assert options.path is not None, "the schema checks it"
    return SourceReader(options.path, _selection(options))


def parts(options: SourceOptions) -> list[SourceOptions]:
    """A source file by file, in order of their names; a dataset is one part."""
    if options.path is None:
        return [options]
    files = SourceReader(options.path, _selection(options)).files
    return [options.model_copy(update={"path": Path(file)}) for file in files]


def _selection(options: SourceOptions) -> Selection:
    whole_files: bool = load_plugin(FORMATS, options.format).WHOLE_FILES
    return Selection(whole_files, options.include, options.exclude)
