"""trackio, Hugging Face's local dashboard: needs ``pip install 'helixctl[trackio]'``; look at it with ``trackio show``.

A resumed run goes on under the name of its run directory. The library is imported when the sink is opened, not before.
"""

from __future__ import annotations

import os
from pathlib import Path

from helixctl.metrics.sink import LoggedRun, import_extra


def open_sink(run_dir: Path, total_steps: int, resume_step: int | None = None) -> LoggedRun:
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
    return LoggedRun(run)
