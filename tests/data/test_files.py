"""Source files: plain and packed, folders, and files that are broken."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from helixctl.data.files import Selection, SourceReader
from helixctl.errors import DataError


def test_plain_and_packed_files_give_the_same_lines(tmp_path: Path) -> None:
    content = b"one\r\n\n  \ntwo\nlast without a break"
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content[:9]) + gzip.compress(content[9:]))
    for name in ("a.jsonl", "b.jsonl.gz"):
        reader = SourceReader(tmp_path / name)
        pieces = list(reader.pieces())
        assert [(p.line, p.raw.strip()) for p in pieces] == [(1, b"one"), (4, b"two"), (5, b"last without a break")]
        assert pieces[0].where == f"{tmp_path / name}:1"
        stored = (tmp_path / name).read_bytes()
        assert reader.num_bytes == reader.total_bytes == len(stored)
        assert reader.sha256 == hashlib.sha256(stored).hexdigest()


def test_a_folder_is_its_files_in_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in (("b.jsonl", "2"), ("a.json", "1"), ("sub/c.jsonl", "3"), ("notes.txt", "no")):
        (tmp_path / name).write_text(text)
    reader = SourceReader(tmp_path)
    assert [p.raw for p in reader.pieces()] == [b"1", b"2", b"3"]
    assert reader.num_bytes == 3
    whole = SourceReader(tmp_path, Selection(whole_files=True))
    assert [(p.raw, p.line) for p in whole.pieces()] == [(b"1", 1), (b"2", 1), (b"no", 0), (b"3", 1)]


def test_bytes_are_counted_while_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"x" * 99 + b"\n")
    (tmp_path / "b.jsonl").write_bytes(b"y" * 99 + b"\n")
    reader = SourceReader(tmp_path)
    assert [reader.num_bytes for _ in reader.pieces()] == [100, 200]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
@pytest.mark.parametrize("whole_files", [False, True])
def test_a_file_that_holds_nothing_is_an_error(tmp_path: Path, content: bytes, whole_files: bool) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.txt is empty"):
        list(SourceReader(tmp_path / "a.txt", Selection(whole_files)).pieces())


def test_missing_files_and_folders_without_data_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file or folder"):
        SourceReader(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no file that ends in \.jsonl or \.json"):
        SourceReader(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:-12],
        lambda packed: b"not gzip at all",
        lambda packed: packed[:20] + b"\0\0\0\0" + packed[24:],
    ],
)
def test_a_damaged_packed_file_is_an_error_that_names_it(tmp_path: Path, damage) -> None:
    packed = gzip.compress(b"".join(b'{"line": %d}\n' % i for i in range(1000)))
    (tmp_path / "a.jsonl.gz").write_bytes(damage(packed))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is damaged"):
        list(SourceReader(tmp_path / "a.jsonl.gz").pieces())


def test_an_unreadable_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}\n")
    reader = SourceReader(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read: No such file"):
        list(reader.pieces())
