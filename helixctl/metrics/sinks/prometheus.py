"""The latest numbers as a Prometheus text page on http://127.0.0.1:9464/metrics while the run goes on.

Opt-in: add `prometheus` to `metrics.sinks`. Nothing outside of this machine can reach it. ``HELIXCTL_PROMETHEUS_PORT``
names another port, 0 a free one; the address stands in ``prometheus.txt`` of the run directory. Every metric is a gauge
with the label ``run``: ``train/loss`` is ``helixctl_train_loss``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from helixctl.engine.text_server import TextServer
from helixctl.errors import UsageError
from helixctl.metrics.names import MEANINGS

PORT = "HELIXCTL_PROMETHEUS_PORT"
DEFAULT_PORT = 9464
ADDRESS_FILE = "prometheus.txt"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusSink:
    """Keeps the newest value of every name."""

    def __init__(self, run_dir: Path, total_steps: int, port: int) -> None:
        self._run = run_dir.name
        self._values: Mapping[str, float] = {"total_steps": total_steps}
        self._file = run_dir / ADDRESS_FILE
        self._server = TextServer(port, "/metrics", CONTENT_TYPE, lambda: format_values(self._run, self._values))
        self._file.write_text(f"{self._server.url}\n", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show ``values`` from now on; names not among them keep theirs."""
        self._values = {**self._values, "step": step, **values}  # replaced, not changed: a request reads either

    def close(self) -> None:
        """Stop answering."""
        self._server.close()
        self._file.unlink(missing_ok=True)


def open_sink(run_dir: Path, total_steps: int, resume_step: int | None = None) -> PrometheusSink:
    """Listen on localhost.

    Raises:
        UsageError: the port is taken or is no port.
    """
    text = os.environ.get(PORT, str(DEFAULT_PORT))
    try:
        return PrometheusSink(run_dir, total_steps, int(text))
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(
            f"metrics sink 'prometheus' cannot listen on port {text}: {error}",
            fix=f"set {PORT} to a free port, or to 0 for any",
        ) from error


def format_values(run: str, values: Mapping[str, float]) -> str:
    """Prometheus' text format, version 0.0.4: one gauge per name."""
    label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for name, value in sorted(values.items()):
        gauge = "helixctl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if name in MEANINGS:
            lines.append(f"# HELP {gauge} {MEANINGS[name]}")
        lines += [f"# TYPE {gauge} gauge", f'{gauge}{{run="{label}"}} {_number(value)}']
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
