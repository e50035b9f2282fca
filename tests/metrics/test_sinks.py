"""Sinks: each step once, also after a resume, and no failing sink ends a run."""

from __future__ import annotations

import io
import json
import logging
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from helixctl.errors import UsageError
from helixctl.metrics import names
from helixctl.metrics.sink import SinkGroup, open_sinks
from helixctl.metrics.sinks import console, jsonl, tensorboard
from helixctl.plugins import SINKS, load_plugin, plugin_names
from tests.metrics.fakes import FAKES, install_fake


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / jsonl.FILE).read_text().splitlines()]


def write_steps(run_dir: Path, *steps: int, resume_step: int | None = None) -> None:
    sink = jsonl.open_sink(run_dir, 100, resume_step)
    for step in steps:
        sink.write(step, {names.TRAIN_LOSS: float(step)})
    sink.close()


@pytest.mark.parametrize("name", plugin_names(SINKS))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_plugin_keeps_the_protocol(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in FAKES:
        install_fake(monkeypatch, extra)
    sink = load_plugin(SINKS, name).open_sink(tmp_path, 10, 4)
    sink.write(5, {names.TRAIN_LOSS: 1.5, names.TRAIN_ACCEPT_LEN: math.nan})
    sink.write(5, {names.VAL_LOSS: math.inf})
    sink.close()
    assert load_plugin(SINKS, name).__doc__


class TestJsonl:
    def test_a_line_per_write(self, tmp_path: Path) -> None:
        sink = jsonl.JsonlSink(tmp_path / "m.jsonl", clock=lambda: 12.3456)
        sink.write(10, {names.TRAIN_LOSS: 0.5})
        assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 10, "time": 12.346, "train/loss": 0.5}
        sink.close()

    def test_values_that_are_not_finite_are_visible_in_valid_json(self, tmp_path: Path) -> None:
        sink = jsonl.open_sink(tmp_path, 10)
        sink.write(1, {"a/nan": math.nan, "a/inf": math.inf, "a/neg": -math.inf})
        sink.close()
        (line,) = lines_of(tmp_path)
        assert [line["a/nan"], line["a/inf"], line["a/neg"]] == ["NaN", "Infinity", "-Infinity"]

    def test_resume_has_each_step_once(self, tmp_path: Path) -> None:
        write_steps(tmp_path, 10, 20, 30, 40)
        write_steps(tmp_path, 30, 40, 50, resume_step=20)
        assert [line["step"] for line in lines_of(tmp_path)] == [10, 20, 30, 40, 50]

    def test_a_torn_last_line_is_removed(self, tmp_path: Path) -> None:
        write_steps(tmp_path, 10, 20)
        for torn in ('{"step": 25, "tr', '{"step": 15}', "null\n", '{"step": "x"}\n'):
            with (tmp_path / jsonl.FILE).open("a") as file:
                file.write(torn)
            write_steps(tmp_path, resume_step=20)
            assert [line["step"] for line in lines_of(tmp_path)] == [10, 20]
        assert [p.name for p in tmp_path.iterdir()] == [jsonl.FILE]

    def test_a_fresh_run_sets_an_older_file_aside(self, tmp_path: Path) -> None:
        for step in (1, 2, 3):
            write_steps(tmp_path, step)
        assert sorted(p.name for p in tmp_path.iterdir()) == [jsonl.FILE, f"{jsonl.FILE}.1", f"{jsonl.FILE}.2"]
        assert [line["step"] for line in lines_of(tmp_path)] == [3]


class TestTensorboard:
    def test_resume_purges_the_steps_that_come_again(self, tmp_path: Path) -> None:
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        first = tensorboard.open_sink(tmp_path, 40)
        for step in (10, 20, 30):
            first.write(step, {names.TRAIN_LOSS: 1.0})
        first.close()
        first_file = next((tmp_path / tensorboard.FOLDER).iterdir())
        first_file.rename(first_file.with_name("events.out.tfevents.0000000001.earlier"))
        second = tensorboard.open_sink(tmp_path, 40, resume_step=20)
        second.write(30, {names.TRAIN_LOSS: 2.0})
        second.close()
        events = accumulator.EventAccumulator(str(tmp_path / tensorboard.FOLDER))
        events.Reload()
        assert [(e.step, e.value) for e in events.Scalars(names.TRAIN_LOSS)] == [(10, 1.0), (20, 1.0), (30, 2.0)]

    def test_it_is_imported_only_when_opened(self) -> None:
        code = "import sys, helixctl.metrics.sinks.tensorboard as t; print('tensorboard' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"


class TestConsole:
    def show(self, terminal: bool, first_step: int = 0) -> str:
        now = [0.0]
        output = io.StringIO()
        screen = Console(file=output, force_terminal=terminal, width=120, color_system=None)
        sink = console.ConsoleSink(screen, 100, first_step, lambda: now[0])
        now[0] = 90.0
        values = {names.TRAIN_LOSS: 2.5, names.TRAIN_ACCEPT_LEN: 1.25, names.PERF_TOKENS_PER_S: 12345.6}
        sink.write(first_step + 10, values | {"memory/peak_bytes": 1.0, names.TRAIN_BAD_STEPS: 0.0})
        sink.write(first_step + 10, {names.VAL_LOSS: math.nan, names.VAL_ACCEPT_LEN: 1.5})
        sink.write(first_step + 10, {"memory/peak_bytes": 1.0})
        sink.close()
        return output.getvalue()

    def test_plain_lines_without_a_terminal(self) -> None:
        assert self.show(terminal=False).splitlines() == [
            "step 10/100  loss 2.5000  accept_len 1.250  tokens/s 12,346  eta 13:30",
            "step 10/100  val loss nan  val accept_len 1.500",
        ]

    def test_remaining_time_after_a_resume_uses_this_process_only(self) -> None:
        assert "step 60/100  loss 2.5000  accept_len 1.250  tokens/s 12,346  eta 6:00\n" in self.show(False, 50)

    def test_a_bar_on_a_terminal(self) -> None:
        text = self.show(terminal=True)
        assert "10/100" in text
        assert "loss 2.5000  accept_len 1.250  tokens/s 12,346 eta 13:30" in text
        assert "step 10/100  val loss nan  val accept_len 1.500" in text

    @pytest.mark.parametrize(
        ("seconds", "text"), [(None, "-:--"), (5, "0:05"), (3599.6, "1:00:00"), (90061, "25:01:01")]
    )
    def test_durations(self, seconds: float | None, text: str) -> None:
        assert console._duration(seconds) == text


class FakeSink:
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen: list[int] = []
        self.closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self.fails:
            raise OSError("disk full")
        self.seen.append(step)

    def close(self) -> None:
        self.closed = True
        if self.fails:
            raise OSError("disk full")


class TestGroup:
    def test_a_failing_sink_is_counted_and_warned_about_once(self, caplog: pytest.LogCaptureFixture) -> None:
        bad, good = FakeSink(fails=True), FakeSink()
        group = SinkGroup({"bad": bad, "good": good})
        with caplog.at_level(logging.WARNING):
            for step in (1, 2, 3):
                group.write(step, {})
            group.close()
        assert good.seen == [1, 2, 3]
        assert bad.closed
        assert good.closed
        assert group.failures == {"bad": 4, "good": 0}
        assert [record.getMessage().startswith("metrics sink 'bad'") for record in caplog.records] == [True]

    def test_a_sink_that_recovers_goes_on(self) -> None:
        sink = FakeSink(fails=True)
        group = SinkGroup({"s": sink})
        group.write(1, {})
        sink.fails = False
        group.write(2, {})
        assert (sink.seen, group.failures) == ([2], {"s": 1})

    def test_cancellation_is_not_swallowed(self) -> None:
        class Cancelling(FakeSink):
            def write(self, step: int, values: Mapping[str, float]) -> None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            SinkGroup({"s": Cancelling()}).write(1, {})

    def test_an_unknown_sink_is_named_at_once(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="jsnol") as caught:
            open_sinks(["jsonl", "jsnol"], tmp_path, 10)
        assert "jsonl" in (caught.value.fix or "")

    def test_open_sinks_writes_through(self, tmp_path: Path) -> None:
        group = open_sinks(["jsonl"], tmp_path / "new", 10)
        group.write(1, {names.TRAIN_LOSS: 2.0})
        group.close()
        assert lines_of(tmp_path / "new")[0]["train/loss"] == 2.0
