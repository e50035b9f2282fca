"""What reaches workers: the part that does not pickle is named before any process starts."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pytest

from helixctl.data.worker_pickle import check_picklable
from helixctl.errors import UsageError
from tests.conftest import ROOT
from tests.data.worker_cases import Handle, WithLock


class Slotted:
    __slots__ = ("lock", "name")

    def __init__(self) -> None:
        self.name, self.lock = "x", threading.Lock()


class Clean(WithLock):
    """Leaves its lock behind."""

    def __getstate__(self) -> dict[str, Any]:
        return {"index": None}


class Raises:
    def __reduce__(self) -> Any:
        raise RuntimeError("not today")


def local_function() -> Any:
    def collate(batch: Any) -> Any:
        return batch

    return collate


def test_lock_is_named_by_its_path() -> None:
    with pytest.raises(
        UsageError, match=r"dataset\.index\['shards'\]\[0\]\.lock does not pickle.*_thread\.lock"
    ) as info:
        check_picklable(dataset=WithLock())
    assert "__getstate__" in str(info.value.fix)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (partial(print, Handle()), r"given\.args\[0\]\.lock"),
        (Slotted(), r"given\.lock"),
        (Handle().__init__, r"given\.__self__\.lock"),  # type: ignore[misc]  # any bound method will do
        ({"a": (1, {"b": threading.Event()})}, r"given\['a'\]\[1\]\['b'\]"),
        ((n for n in range(3)), "given"),
        (Raises(), "given"),
        (lambda batch: batch, "given"),
        (local_function(), "given"),
    ],
)
def test_whatever_it_is_its_place_is_told(value: Any, path: str) -> None:
    with pytest.raises(UsageError, match=path + r".* does not pickle, and worker processes need it"):
        check_picklable(given=value)


def test_functions_get_their_own_advice() -> None:
    for function in (lambda batch: batch, local_function()):
        with pytest.raises(UsageError, match="collate_fn does not pickle") as info:
            check_picklable(collate_fn=function)
        assert "top level of a module" in str(info.value.fix)


def test_what_pickles_passes_and_is_measured() -> None:
    assert check_picklable(dataset=Clean()) < 1000
    assert check_picklable(dataset=list(range(100_000, 200_000))) > 200_000
    context = multiprocessing.get_context("spawn")
    check_picklable(shared=[context.Lock(), context.Queue(1)])  # these pickle while a process starts, and only then


def test_class_from_standard_input_is_refused() -> None:
    program = """
from helixctl.data.worker_pickle import check_picklable
class Mine: pass
check_picklable(dataset=Mine())
"""
    done = subprocess.run([sys.executable, "-"], input=program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "UsageError: dataset is defined in a notebook or on standard input" in done.stderr
