"""Charts as inline SVG: no script, no library, nothing fetched. Values show up under the pointer (``<title>``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 12, 28
COLOURS = ("#3b6fd4", "#c0392b", "#2e9e6b", "#e08a2e", "#7a5bc4", "#1a93a8")
_MAX_DOTS = 400
"""Points of one line; longer ones are thinned."""

Points = Sequence[tuple[float, float]]


def line_chart(series: Mapping[str, Points], label: str) -> str:
    """Lines over a common horizontal axis; the empty string where there is nothing to draw.

    Args:
        series: Name -> (x, y), finite.
        label: What the chart shows, for people who do not see it.
    """
    drawn = {name: _thin(points) for name, points in series.items() if points}
    everything = [point for points in drawn.values() for point in points]
    if not everything:
        return ""
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    whole = all(float(x).is_integer() for x in xs)  # steps and positions: there is nothing between two of them
    across, up = _ticks(min(xs), max(xs), smallest=1.0 if whole else 0.0), _ticks(min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        return _scale(x, across, LEFT, WIDTH - RIGHT), _scale(y, up, HEIGHT - BOTTOM, TOP)

    parts = [_grid(across, up)]
    for number, (name, points) in enumerate(drawn.items()):
        colour = COLOURS[number % len(COLOURS)]
        dots = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"><title>{escape(name)}: '
            f"{_number(value)} at {_number(at)}</title></circle>"
            for (x, y), (at, value) in zip(dots, points, strict=True)
        ]
    return _svg(parts, label) + _legend(list(drawn))


def bar_chart(bars: Mapping[str, float], label: str) -> str:
    """Bars from zero; the empty string where there is nothing to draw."""
    finite = {name: value for name, value in bars.items() if math.isfinite(value)}
    if not finite:
        return ""
    up = _ticks(0.0, max(*finite.values(), 1e-9))
    room = (WIDTH - LEFT - RIGHT) / len(finite)
    parts = [_grid((), up)]
    for number, (name, value) in enumerate(finite.items()):
        x, y = LEFT + room * (number + 0.15), _scale(value, up, HEIGHT - BOTTOM, TOP)
        height = HEIGHT - BOTTOM - y
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{room * 0.7:.1f}" height="{height:.1f}" fill="{COLOURS[0]}">'
            f"<title>{escape(name)}: {_number(value)}</title></rect>"
            f'<text x="{x + room * 0.35:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(name)}</text>'
        )
    return _svg(parts, label)


def _svg(parts: list[str], label: str) -> str:
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


def _legend(names: list[str]) -> str:
    items = (
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def _grid(across: Sequence[float], up: Sequence[float]) -> str:
    lines = []
    for value in up:
        y = _scale(value, up, HEIGHT - BOTTOM, TOP)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in across:
        x = _scale(value, across, LEFT, WIDTH - RIGHT)
        lines.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_number(value)}</text>')
    return "".join(lines)


def _ticks(low: float, high: float, wanted: int = 5, smallest: float = 0.0) -> tuple[float, ...]:
    """Round numbers that enclose the range, at least ``smallest`` apart."""
    if high - low < 1e-12 * max(abs(high), 1e-3):
        pad = abs(high) * 0.1
        low, high = (low - pad, high + pad) if high else (0.0, 1.0)
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(smallest, next(m * power for m in (1, 2, 5, 10) if m * power >= rough))
    first, last = math.floor(low / step), math.ceil(high / step)
    return tuple(step * i for i in range(first, last + 1))


def _scale(value: float, ticks: Sequence[float], start: float, end: float) -> float:
    return start + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (end - start)


def _thin(points: Points) -> list[tuple[float, float]]:
    """Every n-th point, always with the last."""
    stride = max(1, math.ceil(len(points) / _MAX_DOTS))
    return [*points[:-1:stride], points[-1]]


def _number(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:,.4f}".rstrip("0").rstrip(".")
