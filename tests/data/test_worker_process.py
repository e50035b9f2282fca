"""What is said about a worker that ended while one of its batches waited to be fetched."""

from __future__ import annotations

import os
from typing import Any

import pytest

from helixctl.data.worker_process import watch
from helixctl.errors import DataError


class Worker:
    """A process whose exit code can be read once somebody has waited for it."""

    pid = 4711

    def __init__(self, sentinel: int, exit_code: int | None) -> None:
        self.sentinel = sentinel
        self.exitcode: int | None = None
        self._exit_code = exit_code

    def join(self, timeout_s: float) -> None:
        self.exitcode = self._exit_code


class Loader:
    """Raises ``error`` at its first batch; its one worker has ended with ``exit_code``."""

    num_workers = 1

    def __init__(self, error: Exception, exit_code: int | None) -> None:
        sentinel, self._held = os.pipe()
        if exit_code is not None:
            os.close(self._held)  # as the kernel does when a process ends
        self._error = error
        self._timeout = 1.0
        self._workers = [Worker(sentinel, exit_code)]

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise self._error


def heard(error: Exception, exit_code: int | None) -> Exception:
    with pytest.raises(type(error) if exit_code is None else Exception) as caught:
        list(watch(Loader(error, exit_code), 5.0, "train"))  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(104, "reset"), FileNotFoundError(2, "no socket")])
def test_a_connection_that_broke_with_its_worker_is_told_as_the_workers_end(error: Exception) -> None:
    said = heard(error, -9)
    assert isinstance(said, DataError)
    assert "a worker of the train loader ended: process 4711, exit code -9" in str(said)


def test_an_error_of_the_dataset_stays_what_it_is() -> None:
    assert not isinstance(heard(FileNotFoundError(2, "no file"), None), DataError)
    raised_there = FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 0.\n...")
    assert heard(raised_there, -9) is raised_there
