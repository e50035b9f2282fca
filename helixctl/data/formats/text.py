"""text: plain text, all of it supervised.

A file is one document, unless its name ends in .jsonl or .json (or that and .gz) or .parquet: then every line or row
holds the document under ``text``, or under the source's ``field``. Of a folder, .txt and .py files are read, and those;
the source's ``include`` names others. Python files are read in the encoding that they declare.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from helixctl.data.files import Selection, SourceReader, parse_json
from helixctl.data.records import Bad, Piece, Record, Text
from helixctl.errors import DataError
from helixctl.recipe.schema import SourceOptions

WHOLE_FILES = True


def read(path: Path, options: SourceOptions) -> Iterator[Record]:
    """The documents of a file or folder."""
    return (parse(piece, options) for piece in SourceReader(path, Selection(WHOLE_FILES)).pieces())


def parse(piece: Piece, options: SourceOptions) -> Record:
    """One document.

    Raises:
        DataError: broken JSON, or a text file that is not UTF-8.
    """
    if not piece.line:
        return _whole_file(piece)
    row = parse_json(piece)
    field = options.field or "text"
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        return Bad("no_text", piece.where, f"no text under {field!r}")
    return Text(text, piece.where) if text.strip() else Bad("empty", piece.where, "the text is empty")


def _whole_file(piece: Piece) -> Record:
    if not piece.raw.strip():
        return Bad("empty", piece.where, "the file is empty")
    if piece.path.endswith(".py"):
        return _python_file(piece)
    try:
        return Text(piece.raw.decode("utf-8-sig"), piece.where)
    except UnicodeDecodeError as error:
        raise DataError(f"{piece.where}: not UTF-8 text: {error}", fix="convert it to UTF-8") from error


def _python_file(piece: Piece) -> Record:
    """Source trees hold files that are broken on purpose, so these are dropped and counted."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(piece.raw).readline)
        text = piece.raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        return Bad("not_text", piece.where, str(error))
    return Text(text.replace("\r\n", "\n"), piece.where)
