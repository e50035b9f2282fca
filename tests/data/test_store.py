"""The store: what goes in comes out, and nobody ever sees half of one."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from helixctl.data.store import SourceCounts, Store, TokenizerInfo, is_store, old_path
from helixctl.data.store_writer import StoreWriter
from helixctl.errors import DataError
from tests.data.builders import INFO, write_store


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(("vocab_size", "token_bytes"), [(65535, 2), (65536, 4), (200000, 4)])
def test_documents_come_back_as_they_went_in(tmp_path: Path, vocab_size: int, token_bytes: int) -> None:
    documents = [
        (np.array([5, vocab_size - 1, 7]), np.array([False, True, True])),
        (np.array([9, 9]), np.ones(2, bool)),
    ]
    with StoreWriter(tmp_path / "s", TokenizerInfo("a", "b", vocab_size, 2, None)) as writer:
        assert [writer.add("train", *document) for document in documents] == [0, 1]
        writer.add_prompt({"index": 0, "text": "ümlaut \ud800"})
        source = SourceCounts("x", "chat", 1.0, "train", "c", 10, 3, 2, dropped={"no_anchor": 1})
        manifest = writer.finish([source], mask_policy="all_turns", validation_fraction=0.25)
    store = Store.open(tmp_path / "s")
    train = store.split("train")
    assert (tmp_path / "s/train/tokens.bin").stat().st_size == 5 * token_bytes
    for i, (ids, mask) in enumerate(documents):
        assert train.tokens(i).tolist() == ids.tolist()
        assert train.tokens(i).dtype == np.uint32
        assert train.loss_mask(i).tolist() == mask.tolist()
    assert train.lengths.tolist() == [3, 2] and train.lengths.dtype == np.int32
    assert train.supervised_counts.tolist() == [2, 2]
    assert train.first_anchors.tolist() == [1, 0]
    assert (train.num_tokens, train.num_supervised, train.longest) == (5, 4, 3)
    assert store.split("validation").num_documents == 0
    assert store.manifest == manifest and store.fingerprint == manifest.fingerprint
    assert (manifest.read, manifest.kept, manifest.dropped) == (3, 2, {"no_anchor": 1})
    assert store.prompts() == [{"index": 0, "text": "ümlaut \ud800"}]
    store.verify()
    assert entries(tmp_path) == ["s"]


def test_copies_share_their_tokens(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", INFO) as writer:
        writer.add("train", np.array([1, 2]), np.ones(2, bool), copies=3)
        assert writer.add("train", np.array([3]), np.ones(1, bool)) == 3
        assert writer.split_counts("train").tokens == 7
        writer.finish([], mask_policy="all_turns", validation_fraction=0.0)
    train = Store.open(tmp_path / "s").split("train")
    assert [train.tokens(i).tolist() for i in range(4)] == [[1, 2]] * 3 + [[3]]
    assert (tmp_path / "s/train/tokens.bin").stat().st_size == 6
    with pytest.raises(IndexError, match="document 4 of 4"):
        train.tokens(4)


def test_documents_whose_anchors_lie_behind_the_cut_are_not_trainable(tmp_path: Path) -> None:
    train = write_store(tmp_path / "s", [10, 20, 40, 3]).split("train")
    assert train.first_anchors.tolist() == [5, 10, 20, 1]
    assert train.trainable(40).tolist() == [0, 1, 2, 3]
    assert train.trainable(12).tolist() == [0, 1, 3]
    assert train.trainable(11).tolist() == [0, 3]
    assert train.num_truncated(11) == 2


def test_the_fingerprint_follows_the_content_and_the_tokenizer(tmp_path: Path) -> None:
    first = write_store(tmp_path / "a", [4, 5]).fingerprint
    assert write_store(tmp_path / "b", [4, 5]).fingerprint == first
    assert write_store(tmp_path / "c", [4, 6]).fingerprint != first
    assert write_store(tmp_path / "d", [4, 5], vocab_size=101).fingerprint != first


def test_an_exception_leaves_the_old_store_and_no_trace(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [4, 5])
    with pytest.raises(KeyboardInterrupt), StoreWriter(tmp_path / "s", INFO) as writer:
        writer.add("train", np.array([1, 2]), np.ones(2, bool))
        raise KeyboardInterrupt
    assert Store.open(tmp_path / "s").split("train").num_documents == 2
    assert entries(tmp_path) == ["s"]


def test_a_new_store_replaces_the_old_one(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [4, 5])
    old = Store.open(tmp_path / "s").split("train")
    assert write_store(tmp_path / "s", [7]).split("train").num_documents == 1
    assert old.tokens(1).size == 5  # a reader of the old one keeps its files
    assert entries(tmp_path) == ["s"]


def test_a_full_disk_is_a_clear_error_and_leaves_the_old_store(tmp_path: Path) -> None:
    """The system's own limit on file sizes stands in for a full disk: the write itself fails."""
    write_store(tmp_path / "s", [4, 5])
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        with pytest.raises(DataError, match="could not be written: File too large; what stood there is unchanged"):
            write_store(tmp_path / "s", [30_000] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert Store.open(tmp_path / "s").split("train").num_documents == 2
    assert entries(tmp_path) == ["s"]


def test_a_rename_that_fails_puts_the_old_store_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_store(tmp_path / "s", [4, 5])
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(DataError, match="No space left on device"):
        write_store(tmp_path / "s", [7])
    assert Store.open(tmp_path / "s").split("train").num_documents == 2
    assert entries(tmp_path) == ["s"]


def test_left_overs_of_a_killed_writer_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".s.tmp/train").mkdir(parents=True)
    (tmp_path / ".s.tmp/train/tokens.bin").write_bytes(b"half")
    (tmp_path / ".s.tmp/prompts.jsonl").write_bytes(b"half")
    write_store(tmp_path / "s", [4, 5])
    assert entries(tmp_path) == ["s"]


def test_a_writer_killed_between_its_renames_loses_nothing(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [4, 5])
    (tmp_path / "s").rename(old_path(tmp_path / "s"))
    with pytest.raises(DataError, match=r"(?s)no store at .*left the old one at .*\.s\.old: rename it to s"):
        Store.open(tmp_path / "s")
    with pytest.raises(ZeroDivisionError), StoreWriter(tmp_path / "s", INFO):
        raise ZeroDivisionError
    assert Store.open(tmp_path / "s").split("train").num_documents == 2


def test_two_writers_of_one_store_exclude_each_other(tmp_path: Path) -> None:
    failures: list[str] = []

    def second() -> None:
        try:
            write_store(tmp_path / "s", [4])
        except DataError as error:
            failures.append(error.message)

    with StoreWriter(tmp_path / "s", INFO) as writer:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        writer.finish([], mask_policy="all_turns", validation_fraction=0.0)
    assert failures == [f"another prepare is writing {tmp_path / 's'}"]
    assert is_store(tmp_path / "s")


@pytest.mark.parametrize("kind", ["folder", "file", "json"])
def test_what_is_not_a_store_is_never_replaced(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "mine"
    if kind == "file":
        place.write_text("precious")
    else:
        place.mkdir()
        (place / ("store.json" if kind == "json" else "thesis.txt")).write_text('{"format": "other"}')
    with pytest.raises(DataError, match="is not a store; it will not be replaced"):
        write_store(place, [4])
    assert entries(tmp_path) == ["mine"]
    with pytest.raises(DataError, match="not a store"):
        Store.open(place)


def test_an_empty_folder_may_become_a_store(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    write_store(tmp_path / "s", [4])
    assert entries(tmp_path) == ["s"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: (s / "train/tokens.bin").unlink(), r"is torn: train/tokens\.bin is missing"),
        (lambda s: os.truncate(s / "train/mask.bin", 3), r"train/mask\.bin has 3 bytes instead of 9"),
        (lambda s: (s / "store.json").write_text('{"format": "helixctl-store"'), "cannot be read: JSONDecodeError"),
        (lambda s: (s / "store.json").write_text("[]"), "cannot be read: TypeError"),
        (lambda s: (s / "store.json").unlink(), "is not a store: it has no store.json"),
    ],
)
def test_a_torn_store_is_an_error_that_says_what_and_what_to_do(tmp_path: Path, damage, message: str) -> None:
    write_store(tmp_path / "s", [4, 5])
    damage(tmp_path / "s")
    with pytest.raises(DataError, match=message) as caught:
        Store.open(tmp_path / "s")
    assert caught.value.fix


def test_another_version_and_changed_bytes_are_errors(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [4, 5])
    (tmp_path / "s/train/tokens.bin").write_bytes(bytes(18))
    with pytest.raises(DataError, match=r"tokens\.bin is damaged"):
        store.verify()
    manifest = tmp_path / "s/store.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    with pytest.raises(DataError, match="has store format 99, this helixctl reads 1"):
        Store.open(tmp_path / "s")
    assert write_store(tmp_path / "s", [4]).split("train").num_documents == 1


def test_ids_outside_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    message = "ids from 3 to 100, the vocabulary ends at 99"
    with pytest.raises(DataError, match=message), StoreWriter(tmp_path / "s", INFO) as writer:
        writer.add("train", np.array([3, 100]), np.ones(2, bool))
    assert entries(tmp_path) == []


def test_no_store_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run `helixctl prepare` first"):
        Store.open(tmp_path / "nowhere")


def test_every_file_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def seen_sync(handle: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    def seen_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", seen_sync)
    monkeypatch.setattr(Path, "rename", seen_rename)
    store = write_store(tmp_path / "s", [4])
    synced = {str(Path(e).relative_to(tmp_path / ".s.tmp")) for e in events[: events.index("rename")]}
    assert synced == {*store.manifest.files, "store.json", "train", "validation", "."}
