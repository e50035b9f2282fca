"""The processes of one attempt find each other in a store that may still hold what an earlier attempt wrote.

torchrun restarts the processes of a run and keeps its store: without this, a restarted process reads the addresses
and failures of those that died (seen with torch 2.13, c10d rendezvous). Every process therefore puts a word of its
own into the store; rank 0 reads all words out until everybody has heard the same.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from helixctl.machine import World

_LOOK = timedelta(seconds=0.25)
"""For the others to say something, before the words are read again."""


class NotAllCame(Exception):
    """Some ranks did not answer; ``missing`` says which."""

    def __init__(self, missing: list[int]) -> None:
        super().__init__(f"ranks {missing} did not come")
        self.missing = missing


def call_roll(store: Store, world: World, timeout_s: float) -> Store:
    """Wait until all processes of this attempt are here; the part of ``store`` that is theirs alone.

    Raises:
        NotAllCame: after ``timeout_s``.
    """
    word = secrets.token_hex(8)
    store.set(f"word/{world.rank}", word)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(dist.DistStoreError):  # not yet: the words may have been those of the dead
            return PrefixStore(_lead(store, world) if world.rank == 0 else _answer(store, world.rank, word), store)
    raise NotAllCame([rank for rank in range(world.size) if not store.check([f"word/{rank}"])] or [0])


def _lead(store: Store, world: World) -> str:
    """Call everybody by the word that stands in the store; the roll's name once all have heard it."""
    keys = [f"word/{rank}" for rank in range(world.size)]
    store.wait(keys, _LOOK)
    words = [store.get(key).decode() for key in keys]
    name = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
    for word in words:
        store.set(f"called/{word}", name)
    store.wait([f"heard/{name}/{rank}" for rank in range(1, world.size)], _LOOK)
    store.set(f"complete/{name}", "")
    return name


def _answer(store: Store, rank: int, word: str) -> str:
    """Say that the call was heard; the roll's name once everybody has."""
    store.wait([f"called/{word}"], _LOOK)
    name = store.get(f"called/{word}").decode()
    store.set(f"heard/{name}/{rank}", "")
    store.wait([f"complete/{name}"], _LOOK)
    return name
