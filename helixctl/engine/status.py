"""A status file: what a pipeline is doing, once a second, for `helixctl profile` and for people.

Written by the main thread, which has nothing else to do while stages run. Readers see a whole file at any instant. It
is no record: nothing is flushed to the disk, and a write that fails is reported once and the run goes on.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helixctl.engine.stats import PipelineStats
from helixctl.errors import Interrupted
from helixctl.redact import redact_text

SCHEMA = 1
FILE_NAME = "status.json"
EVERY_S = 1.0
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW

logger = logging.getLogger(__name__)


class StatusFile:
    """Writes the status of one pipeline to one file.

    Args:
        path: the file; replaced as a whole at every write.
        stats: looks at the pipeline.
        counters: numbers of the run that the engine does not know: ``step``, ``trained_tokens`` and so on.
    """

    def __init__(
        self, path: Path, stats: Callable[[], PipelineStats], counters: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._path = path
        self._stats = stats
        self._counters = counters
        self._spent_s = 0.0
        self._has_failed = False

    def write(self) -> None:
        """Write what is true now."""
        self._put("running", None)

    def finish(self, error: BaseException | None = None) -> None:
        """Write how the run ended; ``error`` is None where it came to its end."""
        stopped = error is None or isinstance(error, Interrupted)
        self._put("ended" if stopped else "failed", error)

    def _put(self, phase: str, error: BaseException | None) -> None:
        began_at = time.thread_time()
        content = {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "phase": phase,
            "error": None if error is None else redact_text((str(error).splitlines() or [type(error).__name__])[0]),
            "spent_s": self._spent_s,
            "counters": dict(self._counters()),
            **dataclasses.asdict(self._stats()),
        }
        temporary = self._path.with_name(f".{self._path.name}-{os.getpid()}")
        try:
            # Its name can be guessed: a link that somebody put there is not followed.
            with os.fdopen(os.open(temporary, _WRITE, 0o644), "w", encoding="utf-8") as file:
                file.write(json.dumps(content))
            temporary.replace(self._path)
        except OSError as problem:
            if not self._has_failed:
                logger.warning("%s cannot be written; the run goes on: %s", self._path, problem)
            self._has_failed = True
        self._spent_s += time.thread_time() - began_at
