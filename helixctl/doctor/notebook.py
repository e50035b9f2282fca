"""Jupyter notebooks as one Python text: code cells below each other, commands of IPython blanked, places kept."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_COMMAND = re.compile(r"^(\s*)(?:[%!?]|(?:[\w.]+\s*=\s*)[%!](?!=)|.*\?{1,2}\s*$)")


@dataclass(frozen=True)
class Notebook:
    """The joined text; `places[i]` is the cell (all cells counted from 1) and the line in it of line i + 1."""

    text: str
    places: tuple[tuple[int, int], ...]


def read_notebook(text: str) -> Notebook:
    """Join the code cells of a notebook.

    Raises:
        ValueError: the text is no notebook of format 4.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ValueError("it has no list of cells")
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    for number, cell in enumerate(content["cells"], 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        source = "".join(source) if isinstance(source, list) else str(source)
        for row, line in enumerate(_python_lines(source), 1):
            lines.append(line)
            places.append((number, row))
    return Notebook("\n".join(lines) + "\n", tuple(places))


def _python_lines(source: str) -> list[str]:
    """Lines of a cell; a command becomes `pass`, a cell in another language becomes empty lines."""
    lines = source.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%") and not first.startswith(("%%time", "%%capture", "%%prun", "%%memit")):
        return ["" for _ in lines]
    result = []
    continued = False
    for line in lines:
        command = continued or _is_command(line)
        indent = line[: len(line) - len(line.lstrip())]
        result.append((indent + "pass" if not continued else "") if command else line)
        continued = command and line.rstrip().endswith("\\")
    return result


def _is_command(line: str) -> bool:
    stripped = line.strip()
    return bool(stripped) and not stripped.startswith("#") and _COMMAND.match(line) is not None
