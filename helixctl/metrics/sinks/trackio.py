"""trackio, Hugging Face's local dashboard: needs ``pip install 'helixctl[trackio]'``; look at it with ``trackio show``.

A resumed run goes on under the name of its run directory. The library is imported when the sink is opened, not before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helixctl.metrics.sink import import_extra


class TrackioSink:
    """One chart per name."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


def open_sink(run_dir: Path, total_steps: int, resume_step: int | None = None) -> TrackioSink:
    """Begin a run, or go on with the one of this run directory.

    Raises:
        UsageError: the library is not installed.
    """
    trackio = import_extra("trackio")
    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", "helixctl"),
        name=run_dir.name,
        resume="never" if resume_step is None else "allow",
        config={"total_steps": total_steps},
    )
    return TrackioSink(run)
