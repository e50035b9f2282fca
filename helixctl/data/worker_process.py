"""Worker processes of loaders, seen from both sides: how one begins, and what is said when a batch does not come.

Imported by every worker, so it stays light: a spawned worker of a document loader never imports transformers.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.util
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from helixctl.errors import DataError, UsageError

_DUMP_SIGNAL = signal.SIGUSR1
_LOOK_EVERY_S = 1.0
_SOCKET_BYTES = 107  # sun_path of unix(7), without its end
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_TIMED_OUT = "DataLoader timed out"


class LoaderStalled(DataError):
    """No batch came in time. The stacks of this process and of the workers have been written to stderr."""


@dataclass(frozen=True)
class WorkerStart:
    """What a worker does first: ``worker_init_fn``."""

    seed_key: tuple[int, ...]
    """Numbers that make this loader's workers differ from those of other stages and ranks."""

    def __call__(self, worker: int) -> None:
        """Seed every generator, leave Ctrl-C to the parent, and be ready to show stacks."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.register(_DUMP_SIGNAL, all_threads=True)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
        for_python, for_numpy, for_torch = worker_seeds(self.seed_key, worker)
        random.seed(for_python)
        np.random.seed(for_numpy)
        torch.manual_seed(for_torch)


def as_it_is(batch: Any) -> Any:
    """The collate function: batches are complete when they leave the dataset."""
    return batch


def worker_seeds(seed_key: Sequence[int], worker: int) -> tuple[int, int, int]:
    """Seeds for random, numpy and torch; different for every worker, rank and stage."""
    first, second, third = np.random.SeedSequence([*seed_key, worker]).generate_state(3).tolist()
    return first, second, third


def make_socket_folder() -> Path:
    """The folder in which this process and its workers make their sockets; removed when this process ends.

    Workers hand batches over through sockets, whose paths the system limits to 107 bytes. Where ``TMPDIR`` is longer, a
    worker would drop every batch with no more than a line on stderr and the loop would wait for its timeout; the
    folder then stands in ``/tmp``. It is made here, because a worker that is ended in the middle of an epoch would
    leave one of its own behind.

    Raises:
        UsageError: it stands in a long folder already, or no short one can be written to.
    """
    before = tempfile.tempdir
    if not _is_short(tempfile.gettempdir() + "/pymp-12345678"):
        tempfile.tempdir = next((folder for folder in _SHORT_FOLDERS if os.access(folder, os.W_OK)), before)
    try:
        folder = Path(multiprocessing.util.get_temp_dir())
    finally:
        tempfile.tempdir = before
    if not _is_short(str(folder)):
        text = f"worker processes cannot make sockets in {folder}: their paths have {_SOCKET_BYTES} bytes at most"
        raise UsageError(text, fix="set TMPDIR to a folder with a shorter path")
    return folder


def _is_short(folder: str) -> bool:
    return len(os.fsencode(folder)) + len("/listener-12345678") <= _SOCKET_BYTES


def watch(loader: DataLoader[Any], timeout_s: float, role: str) -> Iterator[Any]:
    """The batches of one iteration; a failure of workers becomes an error that says what to do.

    Raises:
        LoaderStalled: no batch within the loader's timeout.
        DataError: a worker process ended.
    """
    iterator: Any = None
    try:
        iterator = iter(loader)
        while True:
            try:
                batch = _next(iterator, timeout_s if loader.num_workers else None)
            except StopIteration:
                return
            yield batch
    except (RuntimeError, EOFError, OSError) as error:
        processes = getattr(iterator, "_workers", multiprocessing.active_children())
        raise _explain(error, processes, timeout_s, role) from error


def _next(iterator: Any, timeout_s: float | None) -> Any:
    """The next batch, looking every second whether the workers live.

    torch looks only when its own timeout is over, and relies on SIGCHLD before; workers from a server are no children
    of this process, and send none. After torch's timeout one may simply ask again: nothing is lost by it. The timeout
    of the loader itself stays long, because starting an epoch cannot be tried again.
    """
    if timeout_s is None:
        return next(iterator)
    iterator._timeout = min(_LOOK_EVERY_S, timeout_s)
    waited_s = 0.0
    try:
        while True:
            try:
                return next(iterator)
            except RuntimeError as error:
                waited_s += iterator._timeout
                if _TIMED_OUT not in str(error) or waited_s >= timeout_s:
                    raise
    finally:
        iterator._timeout = timeout_s


def _explain(error: Exception, processes: Sequence[Any], timeout_s: float, role: str) -> Exception:
    text, workers = str(error), [process.pid for process in processes]
    if _TIMED_OUT in text:
        states = ", ".join(f"{pid} ({_state(pid)})" for pid in workers)
        dump_stacks(workers)
        return LoaderStalled(
            f"no {role} batch for {timeout_s:g} s; workers {states}; stacks of all processes are on stderr",
            fix="see where they stand; raise timeout_s if they were only slow, or use 0 workers",
        )
    reason = text.partition("\n")[0]
    if isinstance(error, (EOFError, OSError)):  # a worker that dies takes along a batch that waited to be fetched
        broken = wait_for_any([process.sentinel for process in processes], _LOOK_EVERY_S)  # connections break before
        for process in processes:
            if process.sentinel in broken:
                process.join(_LOOK_EVERY_S)  # its exit code comes a moment after it has closed its files
        ended = [f"process {process.pid}, exit code {process.exitcode}" for process in processes if process.exitcode]
        if not ended or "Caught" in reason:  # the dataset's own error
            return error
        reason = ", ".join(ended)
    elif not ("exited unexpectedly" in text or "is killed by signal" in text):
        return error
    fix = "see its message above; if memory ran out, use fewer workers; a script needs a __main__ guard"
    return DataError(f"a worker of the {role} loader ended: {reason}", fix=fix)


def dump_stacks(workers: Sequence[int]) -> None:
    """Write the stacks of this process and of ``workers`` to stderr; a worker that cannot show them is named."""
    out = sys.__stderr__
    if out is None:
        return
    out.write(f"stacks of process {os.getpid()}, the parent:\n")
    out.flush()
    faulthandler.dump_traceback(file=out, all_threads=True)
    for pid in workers:
        if _shows_stacks(pid):
            os.kill(pid, _DUMP_SIGNAL)  # it writes its own, to the same stderr
        else:
            out.write(f"worker {pid} has not begun, or has ended: {_state(pid)}\n")
    out.flush()


def _shows_stacks(pid: int) -> bool:
    """Whether the worker catches the signal; before it has begun the signal would end it."""
    caught = _status(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (_DUMP_SIGNAL - 1) & 1)


def _state(pid: int) -> str:
    return _status(pid).get("State", "gone")


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
