"""The text and tokens formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helixctl.data.formats import text, tokens
from helixctl.data.records import Bad, Piece, Text, Tokens
from helixctl.errors import DataError
from helixctl.plugins import FORMATS, load_plugin, plugin_names
from helixctl.recipe.schema import SourceOptions

OPTIONS = SourceOptions(path=Path("f"))


def piece(row: Any) -> Piece:
    return Piece("f.jsonl", 3, json.dumps(row).encode())


def test_a_text_file_is_one_document_and_a_jsonl_line_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufefffirst\nfile", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "line 1"}\n\n{"text": "line 2"}\n')
    (tmp_path / "ignored.md").write_text("no")
    records = list(text.read(tmp_path, OPTIONS))
    assert [record.text for record in records if isinstance(record, Text)] == ["first\nfile", "line 1", "line 2"]
    assert [record.where for record in records][1:] == [f"{tmp_path}/b.jsonl:1", f"{tmp_path}/b.jsonl:3"]
    assert list(text.read(tmp_path / "ignored.md", OPTIONS)) == [Text("no", f"{tmp_path}/ignored.md")]


def test_text_without_text_is_dropped() -> None:
    assert text.parse(piece({"body": "x"}), OPTIONS) == Bad("no_text", "f.jsonl:3", "no text under 'text'")
    assert text.parse(piece({"body": "x"}), SourceOptions(path=Path("f"), field="body")) == Text("x", "f.jsonl:3")
    assert text.parse(piece({"text": " "}), OPTIONS) == Bad("empty", "f.jsonl:3", "the text is empty")
    assert isinstance(text.parse(piece("x"), OPTIONS), Bad)


def test_a_text_file_in_another_encoding_is_an_error() -> None:
    with pytest.raises(DataError, match=r"f\.txt: not UTF-8"):
        text.parse(Piece("f.txt", 0, "ä".encode("latin-1")), OPTIONS)


def test_ids_and_mask_are_taken_as_they_are() -> None:
    expected = Tokens([5, 6], [False, True], "f.jsonl:3")
    assert tokens.parse(piece({"input_ids": [5, 6], "loss_mask": [0, 1]}), OPTIONS) == expected
    assert tokens.parse(piece({"input_ids": [5, 6], "loss_mask": [False, True]}), OPTIONS) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "no_ids"),
        ({"input_ids": [1]}, "no_mask"),
        ({"input_ids": [1], "loss_mask": [2]}, "no_mask"),
        ({"input_ids": [1], "loss_mask": None}, "no_mask"),
        ({"input_ids": [1.5], "loss_mask": [1]}, "no_ids"),
        ({"input_ids": [True], "loss_mask": [1]}, "no_ids"),
        ({"input_ids": [-1], "loss_mask": [1]}, "no_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "length_mismatch"),
    ],
)
def test_ids_without_a_fitting_mask_are_dropped(row: Any, reason: str) -> None:
    record = tokens.parse(piece(row), OPTIONS)
    assert isinstance(record, Bad) and record.reason == reason


@pytest.mark.parametrize("name", plugin_names(FORMATS))
def test_every_format_is_a_plugin(name: str, tmp_path: Path) -> None:
    plugin = load_plugin(FORMATS, name)
    assert plugin.__doc__ and isinstance(plugin.WHOLE_FILES, bool)
    (tmp_path / "x.jsonl").write_text("{}\n")
    (record,) = plugin.read(tmp_path, OPTIONS)
    assert isinstance(record, Bad) and record == plugin.parse(Piece(f"{tmp_path}/x.jsonl", 1, b"{}\n"), OPTIONS)
