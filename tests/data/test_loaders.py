"""Loaders with real worker processes: no deadlock, no repeats, exact resume, and errors that say what to do."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from helixctl.data.loaders import (
    DocumentLoader,
    WorkerOptions,
    build_loader,
    create_document_loader,
    create_streaming_loader,
)
from helixctl.data.token_batch import TokenBatch
from helixctl.data.window_set import ListedDocuments, StoredDocuments
from helixctl.data.windows import KEPT, TAIL, Shard, WindowOptions
from helixctl.data.worker_process import WorkerStart, watch, worker_seeds
from helixctl.errors import DataError, UsageError
from tests.conftest import ROOT
from tests.data.builders import write_store
from tests.data.test_streaming import OPTIONS, names, stream, tokens, write_text
from tests.data.worker_cases import LOCK, Dying, Locked, Seeds, WithLock

IDS = [[100 * document + place for place in range(5 + document % 7)] for document in range(1, 41)]
LIST_OPTIONS = WindowOptions(seq_len=8, rows=2, eos_id=1)
ALONE = WorkerOptions()
START = WorkerStart((0, 0, 0))


def listed(role: Any = "train", workers: WorkerOptions = ALONE, **more: Any) -> DocumentLoader:
    options = WindowOptions(**{**vars(LIST_OPTIONS), **more})
    return create_document_loader(ListedDocuments(IDS), options, role=role, workers=workers)


def pids() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


# ----------------------------------------------------------------------------------------------------- map-style order


def test_every_window_once_per_epoch_and_other_orders_every_time() -> None:
    loader = listed()
    epochs = [tokens(list(loader)) for _ in range(3)]
    everything = sorted([*chain(*IDS), *[1] * len(IDS)])
    tail = loader.counts[TAIL]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(len(epoch) == len(everything) - tail for epoch in epochs)
    assert tail or sorted(epochs[0]) == everything
    assert tokens(list(listed(stage=1))) != epochs[0] != tokens(list(listed(seed=1)))
    assert tokens(list(listed())) == epochs[0]
    validation = listed("validation")
    assert tokens(list(validation)) == tokens(list(validation))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("role", ["train", "validation"])
def test_ranks_share_windows_without_repeats_and_get_equally_many_batches(world_size: int, role: Any) -> None:
    loaders = [
        create_document_loader(ListedDocuments(IDS), LIST_OPTIONS, role=role, shard=Shard(rank, world_size))
        for rank in range(world_size)
    ]
    batches = [list(loader) for loader in loaders]
    assert {len(own) for own in batches} == {len(loaders[0])}
    together = Counter(t for own in batches for t in tokens(own))
    assert together == Counter(tokens(list(listed(role))))
    assert sum(batch.num_rows for own in batches for batch in own) == loaders[0].counts["windows"]


def test_document_loader_resumes_behind_the_last_batch_handed_out() -> None:
    expected = [tokens([batch]) for batch in [*listed(), *islice(advanced(), 5)]]
    for stop in range(0, len(expected) - 5, 4):
        loader = listed()
        done = [tokens([batch]) for batch in islice(loader, stop)]
        again = listed()
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        rest = [tokens([batch]) for batch in [*again, *islice(again, 5)]]
        assert done + rest == expected
    with pytest.raises(DataError, match="seed 0 -> 3"):
        listed(seed=3).load_state_dict(listed().state_dict())


def advanced() -> DocumentLoader:
    loader = listed()
    loader.set_epoch(1)
    return loader


def test_loader_does_not_touch_the_generators_that_training_uses() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    list(listed())
    assert torch.equal(torch.rand(3), expected)


def test_training_and_validation_read_their_own_files(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [5, 6, 7], [4, 3]).path
    train, validation = StoredDocuments(store, "train"), StoredDocuments(store, "validation")
    assert train.lengths.tolist() == [5, 6, 7] and validation.lengths.tolist() == [4, 3]
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    role: Any
    for role, documents in (("train", train), ("validation", validation)):
        loader: Any = create_document_loader(documents, LIST_OPTIONS, role=role)
        assert sum(int(batch.loss_mask.sum()) for batch in loader) > 0
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before, "nothing to overwrite or clean up"


def test_documents_without_a_window_are_an_error() -> None:
    with pytest.raises(DataError, match="1 documents with 1 tokens fill no window"):
        create_document_loader(ListedDocuments([[5]]), WindowOptions(8, 1, 1, "document", min_tail_len=8))


# ------------------------------------------------------------------------------------------------------- the factory


def test_no_workers_means_no_context_and_none_of_their_options() -> None:
    loader = build_loader(Locked(), "train", WorkerOptions(), START)
    assert (loader.num_workers, loader.multiprocessing_context, loader.persistent_workers) == (0, None, False)
    assert (loader.timeout, loader.prefetch_factor) == (0, None)


def test_validation_has_no_workers_unless_asked() -> None:
    assert WorkerOptions(num_workers=4).count("validation") == 0
    assert WorkerOptions(num_workers=4, val_num_workers=2).count("validation") == 2
    train = build_loader(Locked(), "train", WorkerOptions(num_workers=1, val_num_workers=1), START)
    validation = build_loader(Locked(), "validation", WorkerOptions(num_workers=1, val_num_workers=1), START)
    assert train.persistent_workers and not validation.persistent_workers
    for loader in (train, validation):
        assert loader.multiprocessing_context.get_start_method() == "spawn"
        assert loader.timeout == 300.0


def test_fork_is_refused_with_a_reason() -> None:
    with pytest.raises(UsageError, match="never started by fork"):
        build_loader(Locked(), "train", WorkerOptions(num_workers=1, start_method="fork"), START)  # type: ignore[arg-type]  # the point


def test_lock_in_a_dataset_is_named_before_a_process_starts() -> None:
    before = pids()
    with pytest.raises(UsageError, match=r"dataset\.index\['shards'\]\[0\]\.lock does not pickle"):
        build_loader(WithLock(), "train", WorkerOptions(num_workers=1), START)
    assert pids() == before
    build_loader(WithLock(), "train", WorkerOptions(), START)  # without workers it is nobody's business


def test_our_own_datasets_pickle_small(tmp_path: Path) -> None:
    workers = WorkerOptions(num_workers=1)
    store = write_store(tmp_path / "store", [500] * 200).path
    loaders = [create_document_loader(StoredDocuments(store, "train"), LIST_OPTIONS, workers=workers)]
    assert loaders[0].counts["windows"] > 10_000
    create_streaming_loader(stream(write_text(tmp_path / "text")), OPTIONS, workers=workers)


def test_seeds_differ_by_worker_rank_and_stage() -> None:
    keys = [(0, stage, rank) for stage in range(3) for rank in range(3)]
    seeds = [seed for key in keys for worker in range(4) for seed in worker_seeds(key, worker)]
    assert len(set(seeds)) == len(seeds)


# --------------------------------------------------------------------------------------------------- worker processes


def lock_case(method: str) -> str:
    """What becomes of a loader while another thread holds the lock that its items take."""
    loader: DataLoader[Any] = DataLoader(
        Locked(),
        batch_size=None,
        num_workers=1,
        multiprocessing_context=method,
        timeout=4 if method == "fork" else 120,
    )
    try:
        return str(list(loader))
    except RuntimeError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_lock_held_by_a_thread_of_the_parent_stops_nobody(method: Any) -> None:
    with held():
        loader = build_loader(Locked(), "train", WorkerOptions(num_workers=1, start_method=method), START)
        assert list(watch(loader, 300.0, "train")) == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_same_lock_stops_a_forked_worker_for_ever() -> None:
    """The class of deadlock that this module is about: without it the test above would prove nothing."""
    program = "from tests.data import test_loaders as t\nwith t.held(): print(t.lock_case('fork'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "DataLoader timed out after 4 seconds" in done.stdout, done.stderr


class held:
    """Another thread holds the lock meanwhile."""

    def __enter__(self) -> None:
        self._release, taken = threading.Event(), threading.Event()

        def hold() -> None:
            with LOCK:
                taken.set()
                self._release.wait()

        self._thread = threading.Thread(target=hold, name="holder")
        self._thread.start()
        taken.wait()

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self._thread.join()


@pytest.mark.slow
def test_streaming_workers_repeat_nothing_persist_and_resume(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text")
    workers = WorkerOptions(num_workers=2, start_method="forkserver")
    loader = create_streaming_loader(stream(source), OPTIONS, workers=workers)
    before = pids()
    first = list(loader)
    alive = pids() - before
    assert sorted(names_by_lane(first)) == sorted(f"{file}.{n}" for file in range(3) for n in range(10))
    second = list(loader)
    assert pids() - before == alive and len(alive) == 2, "the same workers in the second epoch"
    assert tokens(second) != tokens(first) and loader.counts[KEPT] == 60
    part = create_streaming_loader(stream(source), OPTIONS, workers=workers)
    done = list(islice(part, 3))
    again = create_streaming_loader(stream(source), OPTIONS, workers=workers)
    again.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert tokens(done + list(again)) == tokens(first), "also the turn of the workers is kept"
    assert tokens(list(again)) == tokens(second)


def names_by_lane(batches: list[TokenBatch]) -> list[str]:
    return [name for lane in (0, 1) for name in names([batch for batch in batches if batch.lane == lane])]


@pytest.mark.slow
def test_document_workers_make_what_the_main_process_makes_and_end_with_the_loader() -> None:
    before = pids()
    workers = WorkerOptions(num_workers=2, val_num_workers=1, start_method="forkserver")
    loader, alone = listed(workers=workers), listed()
    for _ in range(2):
        assert tokens(list(loader)) == tokens(list(alone))
    validation = listed("validation", workers)
    for _ in range(2):
        assert tokens(list(validation)) == tokens(list(listed("validation")))
    assert len(pids() - before) == 2, "validation's workers end with their pass"
    list(islice(loader, 2))
    assert tokens(list(loader)) == tokens(list(islice(advance(listed(), 2), 2, None))), "goes on after a break"
    del loader
    assert pids() == before


def advance(loader: DocumentLoader, epoch: int) -> DocumentLoader:
    loader.set_epoch(epoch)
    return loader


@pytest.mark.slow
def test_workers_are_seeded_differently() -> None:
    loader = build_loader(Seeds(), "validation", WorkerOptions(2, 2, "forkserver"), START)
    rows = list(loader)
    assert len(rows) == 2 and all(len(set(column)) == 2 for column in zip(*rows, strict=True))


@pytest.mark.slow
def test_stall_ends_with_stacks_and_pids_in_place_of_silence() -> None:
    program = """
from helixctl.data.loaders import *
from helixctl.data.worker_process import *
from tests.data.worker_cases import Stuck
if __name__ == "__main__":
    workers = WorkerOptions(num_workers=1, timeout_s=12.0)
    list(watch(build_loader(Stuck(), "train", workers, WorkerStart((0, 0, 0))), workers.timeout_s, "train"))
"""
    done = run_script(program)
    assert "LoaderStalled: no train batch for 12 s; workers" in done.stderr, done.stderr
    assert "stacks of process" in done.stderr and "the parent" in done.stderr
    assert 'worker_cases.py", line' in done.stderr and "in __getitem__" in done.stderr, "the worker's own stack"
    assert re.search(r"workers \d+ \(\w \(\w+\)\)", done.stderr), "its state"


@pytest.mark.slow
def test_worker_that_ends_is_told_by_name() -> None:
    loader = build_loader(Dying(), "train", WorkerOptions(1, start_method="forkserver"), START)
    with pytest.raises(DataError, match=r"a worker of the train loader ended.*exited unexpectedly"):
        list(watch(loader, 300.0, "train"))


@pytest.mark.slow
def test_script_without_a_main_guard_is_told_so() -> None:
    program = """
from helixctl.data.loaders import *
from helixctl.data.worker_process import *
from tests.data.worker_cases import Locked
list(watch(build_loader(Locked(), "train", WorkerOptions(num_workers=1), WorkerStart((0, 0, 0))), 60.0, "train"))
"""
    done = run_script(program)
    assert "worker processes are being started while a worker imports this script" in done.stderr
    assert "bootstrapping phase" not in done.stderr


def run_script(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    folder = Path(os.environ["PYTEST_TMP"])
    script = folder / "script.py"
    script.write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(autouse=True)
def folder_of_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


@pytest.mark.slow
def test_interrupt_is_the_parents_business(tmp_path: Path) -> None:
    loader = listed(workers=WorkerOptions(1, start_method="forkserver"))
    batches = iter(loader)
    next(batches)
    for process in multiprocessing.active_children():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
    assert len(list(batches)) == len(loader) - 1


def test_workers_of_stored_documents_do_not_import_transformers() -> None:
    """It would cost every spawned worker another second."""
    program = (
        "import sys, helixctl.data.document_set, helixctl.data.worker_process\nprint('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_modules_of_loaders_do_nothing_when_a_worker_imports_them(tmp_path: Path) -> None:
    """No folders, no logging set-up, no exit, no CUDA: these run again in every spawned worker."""
    program = """
import logging, os, threading
before = set(os.listdir(".")), list(logging.getLogger().handlers), threading.active_count(), dict(os.environ)
import helixctl.data.loaders, helixctl.data.streaming, torch
after = set(os.listdir(".")), list(logging.getLogger().handlers), threading.active_count(), dict(os.environ)
assert before[:3] == after[:3], (before[:3], after[:3])
assert not torch.cuda.is_initialized()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("processes", "own"), [("1", 8), ("4", 2), ("64", 1), ("many", 8)])
def test_workers_are_judged_by_the_cores_of_a_process(monkeypatch, caplog, processes: str, own: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    for num_workers in (own, own + 1):
        caplog.clear()
        listed(workers=WorkerOptions(num_workers))
        assert ("more do not load faster" in caplog.text) == (num_workers > own)
