"""``metrics.jsonl`` read back: curves by name. Never imports torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Curve = tuple[tuple[int, float], ...]
"""(step, value), in the order written."""


@dataclass(frozen=True)
class History:
    """Every curve of a run."""

    curves: Mapping[str, Curve] = field(default_factory=dict)
    updated_at: float | None = None
    """Unix seconds of the last line."""
    torn: int = 0
    """Lines that could not be read: the last one of a killed run, say."""

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        curve = self.curves.get(name)
        return curve[-1][1] if curve else None

    def finite(self, name: str) -> Curve:
        """A curve without values that cannot be drawn."""
        return tuple((step, value) for step, value in self.curves.get(name, ()) if math.isfinite(value))

    def by_position(self, name_of: Callable[[int], str]) -> tuple[float, ...]:
        """Last values of a numbered family, from 1 up to the first that is not there."""
        found: list[float] = []
        while (value := self.last(name_of(len(found) + 1))) is not None:
            found.append(value)
        return tuple(found)


def read_history(run_dir: Path) -> History:
    """The metrics of a run so far; empty where nothing is written yet."""
    curves: dict[str, list[tuple[int, float]]] = {}
    updated_at, torn = None, 0
    path = run_dir / FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for line in lines:
        entry = _entry(line)
        if entry is None:
            torn += 1
            continue
        updated_at = entry.get("time", updated_at)
        for name, value in entry.items():
            number = _NOT_FINITE.get(value, value) if isinstance(value, str) else value
            if "/" in name and isinstance(number, (int, float)):
                curves.setdefault(name, []).append((entry["step"], float(number)))
    return History({name: tuple(curve) for name, curve in curves.items()}, updated_at, torn)


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None
