"""Values as people read them: the end of a name says the unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def record_rows(record: Any, prefix: str = "") -> dict[str, str]:
    """Fields of a dataclass (or a mapping) as label and text; nested ones get dotted labels, empty ones none."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        record = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    rows: dict[str, str] = {}
    for name, value in record.items():
        label = f"{prefix}{name}"
        if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            rows.update(record_rows(value, f"{label}."))
        elif value is not None and value != () and value != []:
            rows[label] = format_value(str(name), value)
    return rows


def format_value(name: str, value: Any) -> str:
    """A value as people read it; the end of its name says the unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return "\n".join(str(item) for item in value)
    if not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("bytes"):
        return format_bytes(value)
    if name.endswith(("_share", "_ratio", "coverage")):
        return f"{100 * value:.1f} %"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return f"{text} s" if (name.endswith("_s") and not name.endswith("_per_s")) or name == "seconds" else text


def format_bytes(num_bytes: float) -> str:
    """`17179869184` -> `16.0 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while num_bytes >= 1024 and power < len(units) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.1f} {units[power]}" if power else f"{num_bytes:.0f} B"


def format_millions(number: int) -> str:
    """`135300000` -> `135.3 M`; small numbers as they are."""
    return f"{number / 1e6:,.1f} M" if number >= 1e5 else f"{number:,}"
