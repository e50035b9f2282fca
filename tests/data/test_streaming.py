"""Streams without processes: reading lazily, lanes without repeats, exact resume, orders, counts."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helixctl.data import streaming
from helixctl.data.documents import DocumentMaker
from helixctl.data.files import SourceReader
from helixctl.data.loaders import StreamLoader, WorkerOptions, create_streaming_loader
from helixctl.data.records import Piece
from helixctl.data.streaming import Stream, StreamDataset
from helixctl.data.token_batch import TokenBatch
from helixctl.data.windows import KEPT, SHORT, TAIL, Shard, WindowOptions
from helixctl.errors import DataError
from helixctl.models.tokenizer import HelixTokenizer
from helixctl.recipe.schema import DatasetOptions, SourceOptions
from tests.data.templates import byte_tokenizer
from tests.data.test_tables import saved, write_parquet

TOKENIZER = HelixTokenizer(byte_tokenizer(None))
OPTIONS = WindowOptions(seq_len=16, rows=2, eos_id=TOKENIZER.eos_token_id)


def write_text(folder: Path, num_files: int = 3, per_file: int = 10) -> SourceOptions:
    """Documents that name themselves: `<file.number>` and some filling; the folder as a source."""
    folder.mkdir(exist_ok=True)
    for file in range(num_files):
        rows = [{"text": f"<{file}.{n}>" + "x" * (7 * n % 23)} for n in range(per_file)]
        (folder / f"part-{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return SourceOptions(path=folder, format="text")


def stream(source: SourceOptions, **options: Any) -> Stream:
    return Stream((source,), TOKENIZER, **{"buffer_documents": 4, **options})


def names(batches: Iterator[TokenBatch] | list[TokenBatch]) -> list[str]:
    """The documents in the order in which their first character comes."""
    text = "".join(str(TOKENIZER.decode(tokens([batch]))) for batch in batches)
    return [part.split(">")[0] for part in text.split("<") if ">" in part and part[0].isdigit()]


def tokens(batches: list[TokenBatch]) -> list[int]:
    return [t for b in batches for t in b.input_ids[b.document_ids >= 0].tolist()]


def as_worker(
    monkeypatch: pytest.MonkeyPatch, dataset: StreamDataset, worker: int, num_workers: int
) -> Iterator[TokenBatch]:
    monkeypatch.setattr(streaming, "get_worker_info", lambda: SimpleNamespace(id=worker, num_workers=num_workers))
    return iter(dataset)


@pytest.mark.parametrize("packing", ["continuous", "document"])
def test_every_document_is_read_once_whatever_ranks_and_workers(
    packing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_text(tmp_path / "text")
    options = WindowOptions(seq_len=16, rows=2, eos_id=OPTIONS.eos_id, packing=packing, min_tail_len=1)
    everything = sorted(f"{file}.{n}" for file in range(3) for n in range(10))
    for ranks, workers in ((1, 1), (1, 3), (2, 2), (5, 1)):
        seen: list[str] = []
        for rank in range(ranks):
            for worker in range(workers):
                dataset = StreamDataset(stream(source), options, Shard(rank, ranks))
                seen += names(as_worker(monkeypatch, dataset, worker, workers))
        assert sorted(seen) == everything, f"{ranks} ranks of {workers} workers"


def test_first_batch_comes_before_the_second_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_text(tmp_path / "text", num_files=5)
    opened: list[Path] = []
    original = SourceReader.pieces

    def pieces(self: SourceReader) -> Iterator[Piece]:
        opened.extend(self.files)
        return original(self)

    monkeypatch.setattr(SourceReader, "pieces", pieces)
    batches = iter(StreamLoader(stream(source), OPTIONS))
    next(batches)
    assert len(opened) == 1
    assert len(list(batches)) > 3 and len(opened) == 5


def test_nothing_is_written_to_disk(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for role in ("train", "validation"):
        list(create_streaming_loader(stream(source), OPTIONS, role=role))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_order_differs_by_epoch_stage_and_seed_and_repeats(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text")

    def order(seed: int = 0, stage: int = 0, epoch: int = 0, **more: Any) -> tuple[str, ...]:
        loader = StreamLoader(stream(source, **more), WindowOptions(16, 2, OPTIONS.eos_id, seed=seed, stage=stage))
        loader.set_epoch(epoch)
        return tuple(names(list(loader)))

    orders = [order(), order(epoch=1), order(epoch=2), order(stage=1), order(seed=1)]
    assert len(set(orders)) == 5 and len({tuple(sorted(o)) for o in orders}) == 1
    assert order(epoch=1) == orders[1]
    unshuffled = [f"{file}.{n}" for file in range(3) for n in range(10)]
    assert list(order(shuffle=False)) == list(order(shuffle=False, epoch=1)) == unshuffled


def test_second_iteration_is_the_second_epoch_and_endless_streams_say_so(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text")
    loader = StreamLoader(stream(source), OPTIONS)
    first, second = list(loader), list(loader)
    assert tokens(first) != tokens(second) and sorted(names(first)) == sorted(names(second))
    endless = StreamLoader(stream(source, endless=True), OPTIONS)
    both = list(islice(endless, len(first) + len(second)))
    assert tokens(both) == tokens(first) + tokens(second)
    assert {batch.place.epoch for batch in both if batch.place} == {0, 1}


@pytest.mark.parametrize("packing", ["continuous", "document"])
def test_resume_goes_on_at_the_exact_document_after_every_batch(packing: Any, tmp_path: Path) -> None:
    source = write_text(tmp_path / "text")
    (tmp_path / "text" / "odd.jsonl").write_text('{"text": ""}\n{"text": "a"}\n{"no": 1}\n{"text": "<9.9>"}\n')
    stride = 10 if packing == "document" else None
    options = WindowOptions(16, 2, OPTIONS.eos_id, packing, stride, min_tail_len=4)
    whole = StreamLoader(stream(source, endless=True), options)
    expected = list(islice(whole, 80))
    for stop in range(1, 80, 3):
        loader = StreamLoader(stream(source, endless=True), options)
        done = list(islice(loader, stop))
        state = json.loads(json.dumps(loader.state_dict()))
        again = StreamLoader(stream(source, endless=True), options)
        again.load_state_dict(state)
        rest = list(islice(again, 80 - stop))
        assert tokens(done + rest) == tokens(expected)
        assert again.counts == whole.counts


def test_iteration_after_a_break_goes_on_and_set_epoch_begins_anew(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text")
    expected = list(StreamLoader(stream(source), OPTIONS))
    loader = StreamLoader(stream(source), OPTIONS)
    done = list(islice(loader, 3))
    assert tokens(done + list(loader)) == tokens(expected)
    list(islice(loader, 2))
    loader.set_epoch(0)
    assert tokens(list(loader)) == tokens(expected)


def test_resume_does_not_tokenise_what_it_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_text(tmp_path / "text", num_files=1, per_file=40)
    loader = StreamLoader(stream(source), OPTIONS)
    batches = iter(loader)
    while loader.counts[KEPT] < 30:
        next(batches)
    made = 0
    original = DocumentMaker.make

    def make(self: DocumentMaker, record: Any, *, held_out: bool) -> Any:
        nonlocal made
        made += 1
        return original(self, record, held_out=held_out)

    monkeypatch.setattr(DocumentMaker, "make", make)
    again = StreamLoader(stream(source), OPTIONS)
    again.load_state_dict(loader.state_dict())
    list(again)
    assert 0 < made <= 11


def test_state_of_other_options_is_refused_by_name(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text")
    state = StreamLoader(stream(source), OPTIONS).state_dict()
    other = StreamLoader(stream(source), OPTIONS, workers=WorkerOptions(num_workers=2), role="train")
    with pytest.raises(DataError, match="workers 1 -> 2"):
        other.load_state_dict(state)
    with pytest.raises(DataError, match="world_size 1 -> 2"):
        StreamLoader(stream(source), OPTIONS, shard=Shard(0, 2)).load_state_dict(state)


def test_what_is_left_out_is_counted_by_reason(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    rows = [{"text": "long enough " * 2}, {"text": ""}, {"text": "abc"}, {"other": 1}, {"text": "another long one"}]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = WindowOptions(16, 2, OPTIONS.eos_id, "document", min_tail_len=8)
    loader = StreamLoader(stream(SourceOptions(path=folder, format="text")), options)
    list(loader)
    assert loader.counts == {KEPT: 2, "empty": 1, "no_text": 1, SHORT: 1, TAIL: 1}
    assert sum(loader.counts.values()) - loader.counts[TAIL] == len(rows)


def test_source_without_a_usable_document_gives_counts_and_no_batch(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"other": 1}\n' * 3)
    loader = StreamLoader(stream(SourceOptions(path=tmp_path, format="text")), OPTIONS)
    assert list(loader) == [] and loader.counts == {"no_text": 3}


def test_a_stream_of_parquet_and_a_dataset_gives_what_jsonl_gives(tmp_path: Path) -> None:
    rows = [{"text": f"word{i} " * (1 + i % 5)} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        SourceOptions(path=tmp_path / "a.jsonl", format="text"),
        SourceOptions(path=write_parquet(tmp_path / "a.parquet", rows), format="text"),
        SourceOptions(dataset=DatasetOptions(name=str(saved(tmp_path / "set", rows))), format="text"),
    ]
    plain, parquet, dataset = (tokens(list(StreamLoader(stream(source), OPTIONS))) for source in sources)
    assert plain == parquet == dataset and plain


def test_weights_repeat_and_thin_out_the_same_documents_every_time(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text", num_files=1, per_file=40)
    counts = [
        Counter(names(list(StreamLoader(stream(source.model_copy(update={"weight": w})), OPTIONS)))) for w in (2, 0.5)
    ]
    assert set(counts[0].values()) == {2} and len(counts[0]) == 40
    assert set(counts[1].values()) == {1} and len(counts[1]) == 20


def test_conversations_are_learnt_where_the_assistant_speaks(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "tell"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [*said, {"role": "user", "content": "more"}]}) + "\n")
    options = WindowOptions(128, 1, OPTIONS.eos_id)
    [batch] = StreamLoader(stream(SourceOptions(path=tmp_path, format="chat")), options)
    labels = batch.labels()[0]
    assert TOKENIZER.decode(labels[labels != -100].tolist()) == "tell<|im_end|>"
    assert int(batch.input_ids[0, batch.num_tokens - 1]) == OPTIONS.eos_id, "ends, but the end is not learnt"


def test_main_process_reads_without_threads_or_processes(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text")
    before = len(os.listdir("/proc/self/task"))
    list(StreamLoader(stream(source), OPTIONS, role="validation"))
    assert len(os.listdir("/proc/self/task")) == before
