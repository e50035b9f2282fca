"""Asks the profiled run for a trace of its kernels and CUDA calls, and waits for it; see ``training.cuda_trace``."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixctl.training.cuda_trace import ANSWER, REQUEST, TRACE

TRACE_S = 2.0
_LONGEST_S = 180.0
"""For the run to write the trace: a second of a GPU is some ten thousand kernels."""


@dataclass(frozen=True)
class Traced:
    """What the run answered. Instants are those of ``time.monotonic``; the trace begins a little before."""

    events: tuple[dict[str, Any], ...] = ()
    text: bytes = b""
    """The whole trace, for other tools."""
    problem: str | None = None
    """Why there is no trace."""
    began_at: float = 0.0
    ended_at: float = 0.0


class TraceRequest:
    """One request, made when the object is."""

    def __init__(self, run_dir: Path, seconds: float = TRACE_S) -> None:
        self._run_dir = run_dir
        self._began_at = time.monotonic()
        (run_dir / ANSWER).unlink(missing_ok=True)
        temporary = run_dir / f".{REQUEST}"
        temporary.write_text(repr(seconds), encoding="ascii")
        temporary.replace(run_dir / REQUEST)

    @property
    def waited_s(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began_at

    def answer(self) -> Traced | None:
        """The answer, or None while it is not there."""
        try:
            said: dict[str, Any] = json.loads((self._run_dir / ANSWER).read_text(encoding="utf-8"))
            text = b"" if said["problem"] else (self._run_dir / TRACE).read_bytes()
        except OSError:
            if self.waited_s < _LONGEST_S:
                return None
            said, text = {"problem": f"the run did not write a trace within {_LONGEST_S:g} s"}, b""
        events = tuple(json.loads(text)["traceEvents"]) if text else ()
        return Traced(events, text, said["problem"], said.get("began_at", 0.0), said.get("ended_at", 0.0))
