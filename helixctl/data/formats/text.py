"""text: plain text, all of it supervised.

A file is one document, unless its name ends in .jsonl or .json (or that and .gz): then every line is an object with
the document under ``text``, or under the source's ``field``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from helixctl.data.files import SourceReader, parse_json
from helixctl.data.records import Bad, Piece, Record, Text
from helixctl.errors import DataError
from helixctl.recipe.schema import SourceOptions

WHOLE_FILES = True


def read(path: Path, options: SourceOptions) -> Iterator[Record]:
    """The documents of a file or folder."""
    return (parse(piece, options) for piece in SourceReader(path, whole_files=WHOLE_FILES).pieces())


def parse(piece: Piece, options: SourceOptions) -> Record:
    """One document.

    Raises:
        DataError: broken JSON, or a text file that is not UTF-8.
    """
    if not piece.line:
        try:
            return Text(piece.raw.decode("utf-8-sig"), piece.where)
        except UnicodeDecodeError as error:
            raise DataError(f"{piece.where}: not UTF-8 text: {error}", fix="convert it to UTF-8") from error
    row = parse_json(piece)
    field = options.field or "text"
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        return Bad("no_text", piece.where, f"no text under {field!r}")
    return Text(text, piece.where) if text.strip() else Bad("empty", piece.where, "the text is empty")
