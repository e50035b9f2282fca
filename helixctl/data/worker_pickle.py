"""Whether something reaches a worker process: pickled in advance, and the attribute named that does not pickle.

Spawned and forkserver workers get dataset and functions pickled. Left to itself the error comes from the middle of
starting a process, and says "cannot pickle '_thread.lock' object" without saying where the lock is.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing import connection, queues, synchronize
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from helixctl.errors import UsageError

_INHERITED = (synchronize.SemLock, synchronize.Event, synchronize.Condition, queues.Queue, connection.Connection)
"""Pickle only while a process starts, and do then."""
_MAX_DEPTH = 12


def check_picklable(**given: Any) -> int:
    """Check what workers are given, by the names that messages shall use; returns the pickled bytes of all together.

    Raises:
        UsageError: something does not pickle, or was defined where workers cannot import it.
    """
    num_bytes = 0
    for name, value in given.items():
        _refuse_interactive(name, value)
        sink = _Counter()
        try:
            _Pickler(sink, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        except Exception as error:  # a __reduce__ or __getstate__ may raise anything
            path, cause = find_culprit(name, value)
            text = f"{path} does not pickle, and worker processes need it: {cause or error}"
            raise UsageError(text, fix=_fix(cause or error)) from error
        num_bytes += sink.num_bytes
    return num_bytes


def find_culprit(name: str, value: Any) -> tuple[str, Exception | None]:
    """Path of the innermost part that does not pickle, such as ``dataset.index.lock``, and its error."""
    cause = _error(value)
    if cause is None:
        return name, None
    seen = {id(value)}
    for _ in range(_MAX_DEPTH):
        for path, part in _parts(name, value):
            found = _error(part) if id(part) not in seen else None
            if found is not None:
                seen.add(id(part))
                name, value, cause = path, part, found
                break
        else:
            break
    return name, cause


class _Counter:
    """A file that only counts: a large dataset need not fit into memory twice."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        self.num_bytes += size
        return size


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (int, ()) if isinstance(value, _INHERITED) else NotImplemented


def _error(value: Any) -> Exception | None:
    try:
        _Pickler(_Counter(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # see check_picklable
        return error
    return None


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What ``value`` is made of, as pickle sees it."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, partial):
        yield from ((f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords"))
    elif isinstance(value, MethodType):
        yield f"{name}.__self__", value.__self__
    elif not isinstance(value, type | FunctionType):
        yield from ((f"{name}.{key}", part) for key, part in _state(value).items())


def _state(value: Any) -> dict[str, Any]:
    try:
        state = value.__reduce_ex__(4)[2]
    except Exception:  # it cannot even say what it is made of
        return {}
    if isinstance(state, tuple):  # (__dict__, slots)
        state = {**(state[0] or {}), **(state[1] or {})} if len(state) == 2 else {}
    return {key: part for key, part in state.items() if isinstance(key, str)} if isinstance(state, dict) else {}


def _refuse_interactive(name: str, value: Any) -> None:
    """Classes typed into a notebook or read from standard input pickle by name, and no worker can import that name."""
    owner = value if isinstance(value, type | FunctionType) else type(value)
    main = sys.modules["__main__"]
    has_file = Path(getattr(main, "__file__", None) or "<none>").is_file()
    if owner.__module__ == "__main__" and main.__spec__ is None and not has_file:
        text = f"{name} is defined in a notebook or on standard input, where worker processes cannot import it"
        raise UsageError(text, fix="put it into a module, or use num_workers=0")


def _fix(cause: Exception) -> str:
    text = str(cause)
    if "<lambda>" in text or "local object" in text or "<locals>" in text:
        return "define it at the top level of a module; functools.partial of such a function is fine"
    return "make it on first use in the worker, or leave it out in __getstate__; num_workers=0 needs no pickling"
