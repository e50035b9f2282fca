"""The look of every HTML page: one style sheet, a frame that lets nothing call out, sections and tables.

A page is one file without scripts, fonts or pictures from elsewhere; whatever a run wrote is escaped. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from helixctl.version import __version__

STYLE = """
:root { --ink: #1c2330; --dim: #667085; --line: #e3e7ee; --paper: #ffffff; --panel: #f6f8fb;
        --cpu: #3b6fd4; --ready: #f0923b; --hold: #5aa38c; --flow: #7a5bc4; --bad: #c0392b; --good: #2e7d4f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf2; --dim: #98a2b3; --line: #303a4a; --paper: #151a22; --panel: #1d2430;
          --cpu: #6d9bf5; --ready: #f5ab62; --hold: #74c3a9; --flow: #a58bea; --bad: #ff8a7a; --good: #7fd3a2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 24px 60px; color: var(--ink); background: var(--paper);
       font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; }
.dim { color: var(--dim); } .num { text-align: right; font-variant-numeric: tabular-nums; }
.verdict { background: var(--panel); border-left: 5px solid var(--flow); padding: 14px 18px; border-radius: 4px; }
.verdict.fail { border-color: var(--bad); } .verdict.good { border-color: var(--good); }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; color: var(--dim); }
td, th { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.scroll { overflow-x: auto; }
"""
"""Colours, type, headings and tables, for pages of any layout."""

CARDS = """
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px;
       margin: 18px 0; }
section { background: var(--panel); border-radius: 6px; padding: 14px 18px; min-width: 0; }
section.wide { grid-column: 1 / -1; } h2 { font-size: 16px; margin: 0 0 8px; }
.facts td:first-child { color: var(--dim); white-space: nowrap; } .facts td { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: currentColor; }
.bar { width: 45%; } .bar i { display: block; height: .8em; margin-top: .35em; background: var(--cpu); }
.grid { stroke: var(--line); } .legend { margin: .2rem 0 0; display: flex; flex-wrap: wrap; gap: 0 1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
pre { overflow-x: auto; font-size: 13px; } .failed { color: var(--bad); }
p.note { color: var(--dim); margin: 0 0 .5rem; }
"""
"""The layout of pages that are a grid of sections."""


def make_page(title: str, body: Iterable[str], *, intro: str = "", style: str = "") -> str:
    """A whole page: a heading, ``intro`` below it, and sections in a grid; all three as HTML but the title."""
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    parts = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # A page that people pass on: nothing in it may call out, whatever a run wrote.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{STYLE}{CARDS}{style}</style></head>\n<body><h1>{escape(title)}</h1>\n{intro}<main>\n{parts}\n</main>\n"
        f'<p class="note">helixctl {__version__}, {made}</p></body></html>\n'
    )


def section(heading: str, content: str, *, note: str = "", wide: bool = False) -> str:
    """A card; ``content`` is HTML."""
    told = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section{' class=wide' if wide else ''}><h2>{escape(heading)}</h2>{told}{content}</section>"


def charted(heading: str, chart: str, note: str = "") -> Iterator[str]:
    """A card, where there is something to show."""
    if chart:
        yield section(heading, chart, note=note)


def facts(rows: Mapping[str, Any]) -> str:
    """Names and values."""
    lines = (f"<tr><td>{escape(str(name))}</td><td>{escape(text(value))}</td></tr>" for name, value in rows.items())
    return f'<table class="facts">{"".join(lines)}</table>'


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with a head; numbers stand on the right."""
    top = "".join(f"<th{_side(not index)}>{escape(head)}</th>" for index, head in enumerate(heads))
    lines = (
        "<tr>" + "".join(f"<td{_side(not i)}>{escape(text(value))}</td>" for i, value in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


def bars(rows: Mapping[str, float]) -> str:
    """A table whose values have a length; the empty string where there are none."""
    longest = max(rows.values(), default=0.0) or 1.0
    lines = (
        f"<tr><td>{escape(name)}</td><td>{text(value)}</td>"
        f'<td class="bar"><i style="width:{100 * max(value, 0.0) / longest:.1f}%"></i></td></tr>'
        for name, value in rows.items()
    )
    return f'<table class="facts bars">{"".join(lines)}</table>' if rows else ""


def text(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _side(first: bool) -> str:
    return "" if first else ' class="num"'
