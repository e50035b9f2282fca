"""Where metrics go: the protocol of a sink, and the group that keeps a failing one from ending a run.

A sink is a module in ``metrics/sinks`` with ``open_sink(run_dir, total_steps, resume_step) -> Sink``. ``resume_step``
is the step of the checkpoint that the run goes on from, None for a fresh run; what an earlier process wrote beyond it
is withdrawn, because those steps come again. Sinks are used by one thread.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from helixctl.errors import UsageError
from helixctl.plugins import SINKS, load_plugin

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the numbers of a step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` (names from ``names.py``) after optimizer step ``step``; may come more than once a step."""

    def close(self) -> None:
        """Flush and release; nothing is written afterwards."""


class LoggedRun:
    """A sink for libraries whose runs have ``log`` and ``finish``: one chart per name."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step; they may come in several writes."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write or upload what is left."""
        self._run.finish()


class SinkGroup:
    """Writes to every sink. One that fails is counted, warned about once, and tried again at the next write."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)
        self.failures: dict[str, int] = dict.fromkeys(sinks, 0)
        """Failed writes per sink; belongs in the run's result."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Give ``values`` to every sink."""
        for name, sink in self._sinks.items():
            try:
                sink.write(step, values)
            except Exception as error:
                self._failed(name, f"write step {step}", error)

    def close(self) -> None:
        """Close every sink, also after one fails."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._failed(name, "close", error)

    def _failed(self, name: str, doing: str, error: Exception) -> None:
        self.failures[name] += 1
        if self.failures[name] == 1:
            text = "metrics sink %r could not %s (%s: %s); training goes on, later failures are only counted"
            _log.warning(text, name, doing, type(error).__name__, error)


def import_extra(name: str) -> Any:
    """The library of an optional sink.

    Raises:
        UsageError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"metrics sink {name!r} needs a library that cannot be imported: {error}",
            fix=f"pip install 'helixctl[{name}]', or take {name} out of metrics.sinks",
        ) from error


def open_sinks(names: Sequence[str], run_dir: Path, total_steps: int, resume_step: int | None = None) -> SinkGroup:
    """Open the sinks called ``names``. A sink that cannot even be opened is an error, at once.

    Raises:
        UsageError: no sink has that name, or its library is not installed.
        OSError: the run directory cannot be written.
    """
    opened: dict[str, Sink] = {}
    try:
        for name in names:
            opened[name] = load_plugin(SINKS, name).open_sink(run_dir, total_steps, resume_step)
    except BaseException:
        SinkGroup(opened).close()
        raise
    return SinkGroup(opened)
