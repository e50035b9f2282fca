"""MLflow: needs ``pip install 'helixctl[mlflow]'``. ``MLFLOW_TRACKING_URI`` says where; else ``<run_dir>/mlflow.db``.

The run's id is kept in ``<run_dir>/mlflow-id``, so that a resumed run goes on in the same place. The library is
imported when the sink is opened, not before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helixctl.metrics.sink import import_extra

ID_FILE = "mlflow-id"
FILE = "mlflow.db"


class MlflowSink:
    """All numbers of a write in one call."""

    def __init__(self, client: Any, make_metric: Any, run_id: str) -> None:
        self._client = client
        self._make_metric = make_metric
        self._run_id = run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        now_ms = int(time.time() * 1000)
        metrics = [self._make_metric(name, float(value), now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as ended; a resumed one opens it again."""
        self._client.set_terminated(self._run_id)


def open_sink(run_dir: Path, total_steps: int, resume_step: int | None = None) -> MlflowSink:
    """Begin a run, or go on with the one of this run directory.

    Raises:
        UsageError: the library is not installed.
    """
    mlflow = import_extra("mlflow")
    run_dir.mkdir(parents=True, exist_ok=True)
    place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run_dir / FILE).resolve()}"
    client = mlflow.MlflowClient(tracking_uri=place)
    path = run_dir / ID_FILE
    if resume_step is None or not path.is_file():
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "helixctl")
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        run = client.create_run(experiment, run_name=run_dir.name, tags={"total_steps": str(total_steps)})
        path.write_text(run.info.run_id, encoding="ascii")
    run_id = path.read_text(encoding="ascii").strip()
    return MlflowSink(client, mlflow.entities.Metric, run_id)
