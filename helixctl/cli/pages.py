"""`helixctl docs`: the pages of the documentation, offline; every error names one of them.

A wheel carries the pages; in a checkout they are read where they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from helixctl.cli import render
from helixctl.errors import UsageError
from helixctl.plugins import suggest

_PACKAGE = Path(__file__).parent.parent
_FOLDERS = (_PACKAGE / "docs", _PACKAGE.parent / "docs")
"""In a wheel, in a checkout."""


def docs(
    page: Annotated[str | None, typer.Argument(metavar="PAGE", help="Its name; all of them if left out.")] = None,
    section: Annotated[
        str | None, typer.Argument(metavar="SECTION", help="One section of it, e.g. usageerror of errors.")
    ] = None,
) -> None:
    """Read the documentation: without a page, list the pages."""
    pages = find_pages()
    if page is None:
        render.render_section("helixctl docs PAGE", {name: _title(path) for name, path in pages.items()})
        return
    name = page.removesuffix(".md")
    if name not in pages:
        raise UsageError(f"there is no page {page!r}", fix=suggest(name, tuple(pages)))
    text = pages[name].read_text(encoding="utf-8")
    render.render_markdown(text if section is None else _section(text, name, section))


def find_pages() -> dict[str, Path]:
    """The files of the pages by name."""
    folder = next(folder for folder in _FOLDERS if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.md"))}


def slug(heading: str) -> str:
    """The anchor of a heading, as Python-Markdown and GitHub make it."""
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.strip().replace(" ", "-")


def _section(text: str, page: str, wanted: str) -> str:
    """From the heading to the next of its level or above.

    Raises:
        UsageError: the page has no such section.
    """
    lines = text.splitlines(keepends=True)
    found = [*_headings(lines)]
    for place, (first, level, name) in enumerate(found):
        if name == slug(wanted):
            end = next((line for line, other, _ in found[place + 1 :] if other <= level), len(lines))
            return "".join(lines[first:end])
    raise UsageError(
        f"{page} has no section {wanted!r}", fix=suggest(slug(wanted), tuple(name for _, _, name in found))
    )


def _headings(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Line, level and anchor of every heading outside of fenced blocks."""
    fenced = False
    for number, line in enumerate(lines):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and (heading := re.match(r"(#+) (.+)", line)):
            yield number, len(heading[1]), slug(heading[2])


def _title(path: Path) -> str:
    """The first heading, without its mark-up."""
    text = path.read_text(encoding="utf-8")
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    return heading[1].replace("`", "") if heading else path.stem
