"""``metrics.jsonl`` in the run directory: one JSON object per write, with ``step`` and ``time`` (Unix seconds).

Always valid JSON: a value that is not finite is the string "NaN", "Infinity" or "-Infinity". On resume, lines beyond
the checkpoint's step and a torn last line are removed first, so every step stands there once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

FILE = "metrics.jsonl"


class JsonlSink:
    """Appends a line per write; the operating system has the line when ``write`` returns."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        line = {"step": step, "time": round(self._clock(), 3)} | {name: _plain(v) for name, v in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_sink(run_dir: Path, total_steps: int, resume_step: int | None = None) -> JsonlSink:
    """Open ``metrics.jsonl``. A fresh run sets an older file aside as ``metrics.jsonl.1``, ``.2``, ..."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / FILE
    if path.exists():
        if resume_step is None:
            path.rename(_free_name(path))
        else:
            _withdraw(path, resume_step)
    return JsonlSink(path)


def _withdraw(path: Path, resume_step: int) -> None:
    """Keep whole lines up to ``resume_step``; the file is replaced in one step."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if (step := _step_of(line)) is not None and step <= resume_step]
    if kept == lines:
        return
    shorter = path.with_name(f".tmp-{path.name}")
    shorter.write_bytes(b"".join(kept))
    shorter.replace(path)


def _step_of(line: bytes) -> int | None:
    """The step of a whole line, None for a torn or foreign one."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) and line.endswith(b"\n") else None


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return name


def _plain(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
