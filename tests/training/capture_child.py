"""`python -m tests.training.capture_child RECIPE N`: stores features, and dies by SIGKILL at document N.

It waits there until a first shard is on the disk: another thread writes them.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from threading import Event
from typing import Any

from helixctl.models.target import Target
from helixctl.training.capture import Capture, run_capture
from tests.training.worlds import make_world_plan

SHARD_BYTES = 1 << 14
"""Features are 2 taps x 32 x 4 bytes a token: a few documents a shard."""


def main() -> None:
    recipe, last = Path(sys.argv[1]), int(sys.argv[2])
    original, calls = Target.features, iter(range(last + 1))
    write, written = Capture.write, Event()

    def features(self: Target, batch: Any, **options: Any) -> Any:
        if next(calls) == last:
            assert written.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, batch, **options)

    def write_and_tell(self: Capture, shard: Any, tensors: Any) -> None:
        write(self, shard, tensors)
        written.set()

    # In a process that does nothing else; mypy also misses the parameters' names that nobody uses here.
    Target.features = features  # type: ignore[method-assign]
    Capture.write = write_and_tell  # type: ignore[assignment, method-assign]
    run_capture(Capture(make_world_plan(recipe), recipe.parent / "features", shard_bytes=SHARD_BYTES))


if __name__ == "__main__":
    main()
