"""Work beside the stages: a function that is called again and again in a thread of its own while a block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def called_beside(work: Callable[[threading.Event], object], name: str, every_s: float) -> Iterator[None]:
    """Call ``work`` about every ``every_s`` seconds in a thread called ``name`` until the block ends.

    ``work`` gets an event that is set when the block ends, to cut its own waits short; the block waits for its return.
    """
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(every_s):
            work(ended)

    thread = threading.Thread(target=live, name=name, daemon=False)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
