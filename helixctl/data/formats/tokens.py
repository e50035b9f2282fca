"""tokens: JSONL of ``{"input_ids": [...], "loss_mask": [...]}``, made with the target's own tokenizer.

The mask is 1 (or true) where a token is supervised, and is never guessed: a row without one is dropped. ``field``
names another key for the ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helixctl.data.files import Selection, SourceReader, parse_json
from helixctl.data.records import Bad, Piece, Record, Tokens
from helixctl.recipe.schema import SourceOptions

WHOLE_FILES = False


def read(path: Path, options: SourceOptions) -> Iterator[Record]:
    """The documents of a file or folder."""
    return (parse(piece, options) for piece in SourceReader(path, Selection(WHOLE_FILES)).pieces())


def parse(piece: Piece, options: SourceOptions) -> Record:
    """One document.

    Raises:
        DataError: broken JSON.
    """
    row = parse_json(piece)
    field = options.field or "input_ids"
    ids = row.get(field) if isinstance(row, dict) else None
    mask = row.get("loss_mask") if isinstance(row, dict) else None
    if not isinstance(ids, list) or not all(_is_id(i) for i in ids):
        return Bad("no_ids", piece.where, f"no list of token ids under {field!r}")
    if not isinstance(mask, list) or not all(_is_flag(m) for m in mask):
        return Bad("no_mask", piece.where, "no list of 0 and 1 under 'loss_mask'")
    if len(ids) != len(mask):
        return Bad("length_mismatch", piece.where, f"{len(ids)} ids and a mask of {len(mask)}")
    return Tokens(ids, [bool(m) for m in mask], piece.where)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def _is_flag(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)
