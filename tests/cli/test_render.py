"""What people read: units, widths, samples, results."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from helixctl.cli import render
from helixctl.cli.tables import memory_table, train_rows
from helixctl.cli.values import format_value, record_rows
from helixctl.decoding.distribution import SampleCheck
from helixctl.memory import MemoryLine
from helixctl.training.results import TrainResult
from tests.training.validations import CONFIDENCE, VALIDATED


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("peak_bytes", 3 << 30, "3.0 GiB"),
        ("num_bytes", 12, "12 B"),
        ("elapsed_s", 1.25, "1.25 s"),
        ("tokens_per_s", 12345.6, "12,345.6"),
        ("supervised_share", 0.5, "50.0 %"),
        ("tokens", 1234567, "1,234,567"),
        ("finished", True, "yes"),
        ("paths", ("a", "b"), "a\nb"),
        ("loss", 2.34567, "2.346"),
    ],
)
def test_values_are_written_with_their_unit(name, value, text):
    assert format_value(name, value) == text


def test_records_become_rows_and_empty_fields_none():
    @dataclass(frozen=True)
    class Inner:
        size_bytes: int

    @dataclass(frozen=True)
    class Outer:
        steps: int
        inner: Inner
        nothing: None = None
        empty: tuple[str, ...] = ()

    assert record_rows(Outer(5, Inner(2048))) == {"steps": "5", "inner.size_bytes": "2.0 KiB"}


def test_a_narrow_terminal_is_shared_by_labels_and_texts():
    shown = io.StringIO()
    console = Console(file=shown, width=40)
    render._print_section(console, "title", {"a label of more than half of the width": "and a text", "b": "c " * 20})
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 40 and "and a text" in shown.getvalue()
    shown.truncate(0)
    render._print_section(Console(file=shown, width=100), "title", {"a label": "x " * 200, "b": "c"})
    assert "  a label  x x" in shown.getvalue()


def test_validation_shows_answers_speed_and_proofs(capsys):
    render.render_validation(VALIDATED)
    out = capsys.readouterr().out
    for words in (
        "> What is 1+1?",
        "It is",
        "same as plain decoding",
        "2.125 over all cycles",
        "2.200 tokens per target forward",
        "math  ",
        "75.0 %",
        "1.50x",
        "speed, 8 at a time",
        "1.10x",
        "7 of 8 identical, 1 near-ties",
        "passed: bit for bit",
        "FAILED: 0.5 off",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100


def test_validation_shows_what_the_drafter_expected(capsys):
    render.render_validation(replace(VALIDATED, confidence=CONFIDENCE))
    out = capsys.readouterr().out
    assert "3.00 verified per cycle, 37.5 % of them accepted" in out
    assert "calibration error 0.050 up to the draft, 0.200 where reached, 40 drafts" in out
    assert re.search(r"0\.8 to 0\.9 +30 +0\.850 +0\.900 +30 +0\.800 +0\.600", out)
    assert max(map(len, out.splitlines())) <= 100


def test_validation_without_live_decoding(capsys):
    bare = replace(VALIDATED, accept_len=None, accept_len_shuffled=None, plain_tokens_per_s=None)
    render.render_validation(replace(bare, total=None, sources=(), settings=None, speeds=()))
    out = capsys.readouterr().out
    assert "live decoding" not in out and "by position" not in out


@pytest.mark.parametrize(("p_value", "word"), [(0.4, "yes"), (1e-9, "NO")])
def test_samples_are_judged(capsys, p_value, word):
    render.render_validation(replace(VALIDATED, greedy=(), samples=SampleCheck(1000, 19.0, p_value, 2)))
    out = capsys.readouterr().out
    assert f"the target's distribution  {word}: chi-square 19.0" in out and "2 behind the cut" in out


def test_a_sample_marks_what_is_supervised(capsys):
    render.render_sample(["a", "b", "c", "d"], [False, True, True, False], "document 0")
    out = capsys.readouterr().out
    assert "a«bc»d" in out
    assert "2 of 4 tokens are supervised" in out


def test_text_that_looks_like_markup_stays_as_it_is(capsys):
    render.render_sample(["[bold]", "[/x]"], [True, True])
    render.render_warnings(["[red]x[/red]"])
    captured = capsys.readouterr()
    assert "«[bold][/x]»" in captured.out
    assert "[red]x[/red]" in captured.err


def test_control_characters_of_models_and_documents_are_shown_and_not_obeyed(capsys):
    render.render_answer([("a\x1b[2Jb\n", "draft")])
    render.render_sample(["\x1b]0;x\x07"], [True])
    out = capsys.readouterr().out
    assert "a␛[2Jb\n" in out and "␛]0;x␇" in out and "\x1b" not in out


def test_a_message_in_a_pipe_is_one_line(capsys):
    render.render_warnings(["word " * 60])
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_devices_with_equal_memory_share_a_column():
    lines = tuple(MemoryLine(f"cuda:{i}", "slots", 1 << 30) for i in range(6))
    assert len(memory_table((*lines, MemoryLine("cuda:6", "slots", 2 << 30))).columns) == 3


def test_a_training_result_names_everything():
    result = TrainResult(
        run_dir="run",
        finished=True,
        steps=10,
        total_steps=10,
        tokens_per_s=1000.4,
        train_seconds=3.25,
        loss=None,
        validation={"val/accept_len": 1.5},
        best_value=1.5,
        best_step=10,
        checkpoint=None,
        peak_memory_bytes={"host": 1 << 30},
        accounting={"documents read": 1200},
        pipeline={"features": {"send_wait_s": 1.25, "receive_wait_s": 0.0}},
        predicted_memory_bytes={"host": 1288490189},
        process_memory_bytes={"host": 385 << 20},
        compile_cache="hit, cache.bin",
        compiled={"target-0": {"seconds": 12.34}, "drafter-0": {"seconds": 3.0}},
    )
    assert train_rows(result) == {
        "run": "run",
        "steps": "10 of 10",
        "speed": "1,000 tokens/s over 3.2 s",
        "val/accept_len": "1.5",
        "best": "1.5 at step 10",
        "peak memory, host": "1.0 GiB, 1.2 GiB predicted (385.0 MiB the process itself): 120 %",
        "compiled": "target-0 12.3 s, drafter-0 3.0 s; cache: hit, cache.bin",
        "accounting": "documents read: 1,200",
        "waits, features": "send 1.2 s, receive 0.0 s",
    }


def test_progress_is_silent_in_a_pipe(capsys):
    with render.progress("work") as show:
        show(1, 10)
    assert capsys.readouterr().err.strip() == ""


def test_progress_shows_every_part_of_the_work_and_draws_seldom(monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(render, "_console", lambda **_: console)
    with render.progress("work") as show:
        for done in range(1000):
            show(done, 1000, "plain decoding")
        show(1000, 1000, "plain decoding")
        show(3, 3, "held-out rows")
    text = screen.getvalue()
    assert "plain decoding" in text and "held-out rows" in text and "100%" in text
    assert text.count("plain decoding") < 30
