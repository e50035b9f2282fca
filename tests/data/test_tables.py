"""Parquet files and Hugging Face datasets give what the same rows give as JSONL; broken ones are errors with a fix."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixctl.data import tables
from helixctl.data.files import SourceReader
from helixctl.data.formats import chat, text, tokens
from helixctl.data.records import Chat, Text, Tokens
from helixctl.data.sources import open_source, parts
from helixctl.data.tables import row_piece
from helixctl.errors import DataError
from helixctl.recipe.schema import DatasetOptions, SourceOptions

CHATS = [
    {
        "messages": [
            {"role": "user", "content": "ä", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        ]
    },
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": None}]},
]


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(rows), path, **options)
    return path


def saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets", reason="needs the extra `datasets`")
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_parquet_file_gives_what_jsonl_gives(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", CHATS)
    options = SourceOptions(path=file)
    found = [chat.parse(piece, options) for piece in open_source(options).pieces()]
    plain = list(chat.read(write_jsonl(tmp_path / "a.jsonl", CHATS), options))
    assert all(isinstance(record, Chat) for record in found)
    assert [vars(a) | {"where": ""} for a in found] == [vars(b) | {"where": ""} for b in plain]
    assert [record.where for record in found] == [f"{file}:1", f"{file}:2"]


def test_texts_and_ids_of_parquet_and_progress_to_the_end(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}", "input_ids": [i, 1], "loss_mask": [0, 1]} for i in range(600)]
    file = write_parquet(tmp_path / "a.parquet", rows, row_group_size=100)
    reader = SourceReader(tmp_path)
    done = [(piece, reader.done_bytes) for piece in reader.pieces()]
    options = SourceOptions(path=file, format="text")
    assert text.parse(done[7][0], options) == Text("row 7", f"{file}:8")
    assert tokens.parse(done[7][0], options) == Tokens([7, 1], [False, True], f"{file}:8")
    sizes = [size for _, size in done]
    assert sizes == sorted(sizes) and sizes[299] == file.stat().st_size // 2
    assert reader.done_bytes == reader.num_bytes == reader.total_bytes == file.stat().st_size
    assert parts(SourceOptions(path=tmp_path)) == [SourceOptions(path=file)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_any_row_of_json_values_survives(row: dict[str, Any]) -> None:
    piece = row_piece("f", 3, row)
    assert json.loads(piece.raw.decode("utf-8", "surrogatepass")) == row and piece.where == "f:3"


def test_dates_bytes_and_arrays_become_what_json_has() -> None:
    class Array:
        def tolist(self) -> list[int]:
            return [1, 2]

    row = {"d": datetime.date(2026, 1, 2), "b": b"\0\1", "a": Array()}
    assert json.loads(row_piece("f", 1, row).raw) == {"d": "2026-01-02", "b": "AAE=", "a": [1, 2]}


def test_a_damaged_parquet_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", CHATS)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a\.parquet is damaged: "):
        list(SourceReader(file).pieces())
    write_parquet(tmp_path / "b.parquet", [{"text": "x"}][:0])
    with pytest.raises(DataError, match=r"b\.parquet is empty"):
        list(SourceReader(tmp_path / "b.parquet").pieces())


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="package pyarrow cannot be imported") as caught:
        list(SourceReader(tmp_path / "a.parquet").pieces())
    assert caught.value.fix == "pip install 'helixctl[parquet]'"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="package datasets cannot be imported") as caught:
        open_source(SourceOptions(dataset=DatasetOptions(name="owner/name")))
    assert caught.value.fix == "pip install 'helixctl[datasets]'"


def test_a_saved_dataset_gives_its_rows_and_the_same_hash_every_time(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}"} for i in range(300)]
    options = SourceOptions(dataset=DatasetOptions(name=str(saved(tmp_path / "set", rows))), format="text")
    readers = [open_source(options) for _ in range(2)]
    pieces = [list(reader.pieces()) for reader in readers]
    assert pieces[0] == pieces[1] and [json.loads(piece.raw) for piece in pieces[0]] == rows
    assert pieces[0][9].where == f"{tmp_path / 'set'}[train]:10"
    assert readers[0].sha256 == readers[1].sha256 and readers[0].num_bytes == readers[1].num_bytes > 0
    assert parts(options) == [options]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_data_files_is_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra `datasets`")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", CHATS)
    name = str(tmp_path / "set")
    source = SourceOptions(dataset=DatasetOptions(name=name, streaming=streaming))
    records = [chat.parse(piece, source) for piece in open_source(source).pieces()]
    assert [len(record.messages) for record in records if isinstance(record, Chat)] == [2, 2]
    with pytest.raises(DataError, match=r"set\[test\] cannot be opened: .*test"):
        open_source(SourceOptions(dataset=DatasetOptions(name=name, split="test", streaming=streaming)))


def test_datasets_that_are_not_there_are_errors_with_a_fix(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra `datasets`")
    with pytest.raises(DataError, match=r"nowhere\[train\] cannot be opened") as caught:
        open_source(SourceOptions(dataset=DatasetOptions(name=str(tmp_path / "nowhere"))))
    assert caught.value.fix and "local cache" in caught.value.fix


def test_reading_that_fails_on_the_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def iter(self, batch_size: int) -> Any:
            yield {"text": ["one"]}
            raise ConnectionError("the network is gone")

    monkeypatch.setattr(tables, "_open", lambda options, label: Broken())
    pieces = open_source(SourceOptions(dataset=DatasetOptions(name="x", streaming=True))).pieces()
    assert json.loads(next(pieces).raw) == {"text": "one"}
    with pytest.raises(DataError, match=r"x\[train\] cannot be read: the network is gone"):
        next(pieces)
