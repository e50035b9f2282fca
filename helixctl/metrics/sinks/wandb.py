"""Weights & Biases: needs ``pip install 'helixctl[wandb]'``; account, project and mode come from its own variables.

The run's id is kept in ``<run_dir>/wandb-id``, so that a resumed run goes on in the same place. The library is
imported when the sink is opened, not before.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from helixctl.metrics.sink import LoggedRun, import_extra

ID_FILE = "wandb-id"


def open_sink(run_dir: Path, total_steps: int, resume_step: int | None = None) -> LoggedRun:
    """Begin a run, or go on with the one of this run directory.

    Raises:
        UsageError: the library is not installed.
    """
    wandb = import_extra("wandb")
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / ID_FILE
    if resume_step is None or not path.is_file():
        path.write_text(secrets.token_hex(4), encoding="ascii")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "helixctl"),
        name=run_dir.name,
        id=path.read_text(encoding="ascii").strip(),
        dir=str(run_dir),
        resume="allow",
        config={"total_steps": total_steps},
    )
    return LoggedRun(run)
