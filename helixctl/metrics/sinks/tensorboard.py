"""TensorBoard event files in ``<run_dir>/tensorboard``. On resume, the steps that come again are purged.

The writer is imported when the sink is opened, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorboardSink:
    """One scalar per name."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the scalars of a step and flush them."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def open_sink(run_dir: Path, total_steps: int, resume_step: int | None = None) -> TensorboardSink:
    """Open a new event file; events of an earlier process after ``resume_step`` are purged from view."""
    from torch.utils.tensorboard import SummaryWriter

    purge_step = None if resume_step is None else resume_step + 1
    return TensorboardSink(SummaryWriter(str(run_dir / FOLDER), purge_step=purge_step))
