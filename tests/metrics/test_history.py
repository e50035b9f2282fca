"""Reading metrics back, and charts of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.metrics import charts, names
from helixctl.metrics.charts import bar_chart, line_chart
from helixctl.metrics.history import History, read_history
from helixctl.metrics.sinks import jsonl


def test_what_the_sink_writes_is_read_back(tmp_path: Path) -> None:
    sink = jsonl.open_sink(tmp_path, 10)
    sink.write(5, {"train/loss": 2.5, "train/grad_norm": math.nan})
    sink.write(10, {"train/loss": 2.0})
    sink.write(10, {"val/acc_1": 0.5, "val/acc_2": 0.25, "val/acc_4": 0.1})
    sink.close()
    history = read_history(tmp_path)
    assert history.curves["train/loss"] == ((5, 2.5), (10, 2.0))
    assert history.last("train/loss") == 2.0 and history.last("no/such") is None
    assert math.isnan(history.curves["train/grad_norm"][0][1]) and history.finite("train/grad_norm") == ()
    assert history.by_position(names.val_accuracy) == (0.5, 0.25)
    assert history.updated_at is not None and history.torn == 0


def test_a_torn_line_is_counted_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 3}\nnull\n{"step": 2, "tra', encoding="utf-8")
    history = read_history(tmp_path)
    assert history.curves == {"train/loss": ((1, 3.0),)} and history.torn == 2
    assert read_history(tmp_path / "none") == History()


def parse(chart: str) -> ElementTree.Element:
    """The chart as XML: anything that is not escaped fails here."""
    return ElementTree.fromstring(f"<div>{chart}</div>")


numbers = st.floats(-1e12, 1e12)


@given(st.lists(st.tuples(st.integers(0, 10**7), numbers), min_size=1, max_size=30))
def test_any_curve_stays_inside_its_frame(points: list[tuple[int, float]]) -> None:
    root = parse(line_chart({"a": points}, "chart"))
    dots = root.findall(".//circle")
    assert dots
    for dot in dots:
        assert -0.1 <= float(dot.attrib["cx"]) <= charts.WIDTH + 0.1
        assert -0.1 <= float(dot.attrib["cy"]) <= charts.HEIGHT + 0.1


def test_names_and_labels_are_escaped() -> None:
    name = '<script>alert("x")</script>'
    for chart in (line_chart({name: [(1, 2.0), (2, 3.0)]}, name), bar_chart({name: 1.0}, name)):
        assert "<script" not in chart
        assert parse(chart) is not None


def test_nothing_to_draw_is_no_chart() -> None:
    assert line_chart({"a": []}, "chart") == "" == bar_chart({"a": math.nan}, "chart")


@pytest.mark.parametrize("count", [1, 399, 400, 401, 5000])
def test_long_curves_are_thinned_and_keep_their_end(count: int) -> None:
    chart = line_chart({"a": [(i, float(i)) for i in range(count)]}, "chart")
    dots = parse(chart).findall(".//circle")
    assert len(dots) <= charts._MAX_DOTS + 1
    title = dots[-1].find("title")
    assert title is not None and title.text == f"a: {count - 1:,} at {count - 1:,}"


def test_axes_show_whole_numbers_for_steps_and_positions_and_begin_at_zero_where_all_is_zero() -> None:
    told = [text.text for text in parse(line_chart({"a": [(1, 0.0), (3, 0.0)]}, "chart")).findall(".//text")]
    assert told == ["0", "0.2", "0.4", "0.6", "0.8", "1", "1", "2", "3"]


def test_bars_carry_their_values() -> None:
    root = parse(bar_chart({"1": 0.5, "2": 0.25}, "share"))
    heights = [float(bar.attrib["height"]) for bar in root.findall(".//rect")]
    assert heights[0] == pytest.approx(2 * heights[1], rel=1e-3)
    assert json.dumps([t.text for t in root.findall(".//rect/title")]) == '["1: 0.5", "2: 0.25"]'
