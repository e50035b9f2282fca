"""A training loop of a causal LM without the model: a loader with a worker process that can be made to fail.

Run by the fork server as `FOLDER FAULT`. Every batch that was handed out is written down with the loader's state behind
it, as a checkpoint would.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from helixctl.data.loaders import DocumentLoader, WorkerOptions, create_document_loader
from helixctl.data.window_set import ListedDocuments
from helixctl.data.windows import WindowOptions
from tests.reliability.faults import HANG_S

IDS = [[100 * document + place for place in range(5 + document % 7)] for document in range(1, 61)]
TIMEOUT_S = 3.0
"""Longest wait for a batch of the worker that hangs."""
FAILS_AT = 30
"""Pieces of documents that the worker makes in the second epoch before it fails."""
ARMED = "armed"


class FaultyDocuments(ListedDocuments):
    """Fails in its worker process, in the second epoch."""

    def __init__(self, fault: str, folder: Path) -> None:
        super().__init__(IDS)
        self._fault, self._folder, self._calls = fault, folder, 0

    def piece(self, document: int) -> Any:
        self._calls += (self._folder / ARMED).exists()
        if self._calls == FAILS_AT:
            (self._folder / "instant").write_text(repr(time.monotonic()))
            if self._fault in ("SIGTERM", "SIGKILL"):
                os.kill(os.getpid(), signal.Signals[self._fault])
            if self._fault == "out of memory":
                raise MemoryError("made to fail")
            if self._fault == "hang in C":
                ctypes.CDLL(None).sleep(HANG_S)
            raise RuntimeError("made to fail")
        return super().piece(document)


def make_loader(documents: ListedDocuments, num_workers: int) -> DocumentLoader:
    options = WindowOptions(seq_len=8, rows=2, eos_id=1)
    return create_document_loader(documents, options, workers=WorkerOptions(num_workers))


def main() -> None:
    try:
        run(Path(sys.argv[1]), sys.argv[2])
    finally:
        atexit._run_exitfuncs()  # the fork server's children end without, unlike a program of its own


def run(folder: Path, fault: str) -> None:
    """Two epochs."""
    loader = make_loader(FaultyDocuments(fault, folder), 1)
    with (folder / "done.jsonl").open("a") as done:
        for _epoch in range(2):
            for batch in loader:
                done.write(json.dumps({"ids": batch.input_ids.tolist(), "state": loader.state_dict()}) + "\n")
                done.flush()
            (folder / ARMED).touch()
            if fault == "hang in C":  # only now: on a busy machine the start of a worker takes longer
                loader._workers = WorkerOptions(1, timeout_s=TIMEOUT_S)
