"""Worker processes with every fault that they can have: those of loaders for causal LMs, and those of prepare."""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from helixctl.data.store import Store
from helixctl.data.window_set import ListedDocuments
from tests.data.test_workers import start_endless, wait_until_ended
from tests.fork_server import ForkServer
from tests.reliability.cases import Case
from tests.reliability.harness import Outcome, of_session
from tests.reliability.loader_program import IDS, TIMEOUT_S, make_loader

LOADER, PREPARE = "loader worker", "prepare worker"


def worker_cases() -> Iterator[Case]:
    """In the order of the table; what happens is the same for a training and a validation loader."""
    yield Case(LOADER, "exception", 1, "made to fail", traceback=True, outcome="loop fails with the worker's traceback")
    oom = "MemoryError: made to fail"
    yield Case(LOADER, "out of memory", 1, oom, traceback=True, outcome="loop fails with the worker's traceback")
    shows = "a worker of the train loader ended"
    for fault in ("SIGTERM", "SIGKILL"):
        yield Case(LOADER, fault, 1, shows, traceback=True, outcome="loop fails, says which loader and process")
    shows = f"no train batch for {TIMEOUT_S:g} s"
    yield Case(LOADER, "hang in C", 1, shows, outcome="loop fails after the loader's timeout; stacks of all processes")
    shows = "a process of prepare ended before its work was done"
    yield Case(PREPARE, "SIGKILL", 1, shows, outcome="prepare fails, says so; the old store stays")


def run_worker_case(case: Case, server: ForkServer, folder: Path) -> Outcome:
    """Make the fault happen, and see what is left."""
    folder = Path(tempfile.mkdtemp(prefix=case.name.replace(" ", "-").replace(":", "-"), dir=folder))
    return _kill_prepare(folder) if case.role == PREPARE else _run_loader(case, server, folder)


def _run_loader(case: Case, server: ForkServer, folder: Path) -> Outcome:
    """After the fault, go on from the state behind the last batch and compare with an undisturbed loop."""
    child = server.start([str(folder), case.fault], folder, program="tests.reliability.loader_program")
    code = child.wait()
    ended_at = time.monotonic()
    done = [json.loads(line) for line in (folder / "done.jsonl").read_text().splitlines()]
    loader = make_loader(ListedDocuments(IDS), 0)
    whole = [batch.input_ids.tolist() for _epoch in range(2) for batch in loader]
    loader = make_loader(ListedDocuments(IDS), 0)
    loader.load_state_dict(done[-1]["state"])
    rest = [batch.input_ids.tolist() for batch in loader]
    return Outcome(
        exit_code=code,
        output=child.output,
        detection_s=ended_at - float((folder / "instant").read_text()),
        orphans=tuple(pid for pid in of_session(child.pid) if not ends_within(pid, 2.0)),
        checkpoint_step=len(done),
        damaged=0,
        leftovers=False,
        accounting={},
        same_parameters=0 < len(rest) < len(whole) and [one["ids"] for one in done] + rest == whole,
        same_metrics=True,
    )


def _kill_prepare(folder: Path) -> Outcome:
    process, workers = start_endless(folder)
    killed_at = time.monotonic()
    signal.pidfd_send_signal(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    ended_at = time.monotonic()
    wait_until_ended(workers)
    return Outcome(
        exit_code=process.returncode,
        output=errors,
        detection_s=ended_at - killed_at,
        orphans=tuple(pid for pid in of_session(process.pid) if not ends_within(pid, 2.0)),
        checkpoint_step=0,
        damaged=0,
        leftovers=False,
        accounting={},
        same_parameters=Store.open(folder / "store").split("train").num_documents == 3,
        same_metrics=True,
    )


def ends_within(pid: int, timeout_s: float) -> bool:
    """Whether a process is gone by then: multiprocessing's own tracker ends when it hears that its parent has."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
