"""Datasets and programs for tests of worker processes; importable by name, as workers need it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

LOCK = threading.Lock()
"""Another thread of the parent holds it while workers start."""


class Locked(Dataset[int]):
    """Takes the module's lock for every item."""

    def __getitem__(self, index: int) -> int:
        with LOCK:
            return index

    def __len__(self) -> int:
        return 4


class Seeds(IterableDataset[Any]):
    """What the generators of each worker say first."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        yield info.id, random.random(), float(np.random.rand()), float(torch.rand(()))


class Stuck(Dataset[int]):
    """Never gives an item."""

    def __getitem__(self, index: int) -> int:
        threading.Event().wait()
        raise AssertionError

    def __len__(self) -> int:
        return 2


class Dying(Dataset[int]):
    """Ends its worker."""

    def __getitem__(self, index: int) -> int:
        import os

        os._exit(3)

    def __len__(self) -> int:
        return 2


class WithLock(Dataset[int]):
    """Holds a lock where nobody would look."""

    def __init__(self) -> None:
        self.index = {"shards": [Handle()]}

    def __getitem__(self, index: int) -> int:
        return index


class Handle:
    def __init__(self) -> None:
        self.path = "shard-0"
        self.lock = threading.Lock()
