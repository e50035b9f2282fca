"""scripts/gpu_tests.py finds what needs a GPU; scripts/resumable.py goes on where it was cut short."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from scripts import gpu_tests
from scripts.resumable import Command, Session

SLEEPER = "import select; print('up', flush=True); select.select([], [], [])"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A project of three test files, two of them for a GPU, one of these failing until a file `mended` exists."""
    tests = tmp_path / "tests"
    tests.mkdir()
    mark = "import pytest, pathlib\n@pytest.mark.gpu\n"
    (tests / "test_good.py").write_text(mark + "def test_it(): pass\n")
    (tests / "test_bad.py").write_text(mark + "def test_it(): assert pathlib.Path('mended').exists()\n")
    (tests / "test_cpu.py").write_text("def test_it(): raise SystemExit(9)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    return tmp_path


def read(out: Path) -> list[tuple[str, int]]:
    return [(line["name"], line["exit_code"]) for line in map(json.loads, out.read_text().splitlines())]


def test_only_failed_files_run_again(world, capsys):
    out = world / "out.jsonl"
    assert gpu_tests.main(["--out", str(out)]) == 1
    assert sorted(read(out)) == [("tests/test_bad.py", 1), ("tests/test_good.py", 0)]
    printed = capsys.readouterr().out
    assert "AssertionError" in printed and printed.endswith("1 of 2 files passed\nnot: tests/test_bad.py\n")
    (world / "mended").touch()
    assert gpu_tests.main(["--out", str(out)]) == 0
    assert read(out)[2:] == [("tests/test_bad.py", 0)]
    assert capsys.readouterr().out.endswith("2 of 2 files passed\n")


def test_words_choose_files(world):
    assert gpu_tests.main(["--out", str(world / "out"), "good"]) == 0
    assert read(world / "out") == [("tests/test_good.py", 0)]


def test_nothing_starts_that_does_not_fit_the_time(tmp_path):
    long, short = Command("long", ("touch", "long"), expected_s=900), Command("short", ("touch", "short"))
    assert Session(tmp_path, tmp_path / "out", 600).run([long, short]) == ["long"]
    assert (tmp_path / "short").exists() and not (tmp_path / "long").exists()


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    slow = Command("slow", (sys.executable, "-c", SLEEPER), limit_s=0.5)
    assert Session(tmp_path, tmp_path / "out", 600).run([slow]) == ["slow"]
    line = json.loads((tmp_path / "out").read_text())
    assert line["exit_code"] == -signal.SIGKILL and "ended after" in line["output"]


def test_a_termination_ends_what_runs_and_starts_nothing_more(tmp_path):
    parent = f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); {SLEEPER}"
    waiting = Command("waiting", (sys.executable, "-c", parent))
    assert Session(tmp_path, tmp_path / "out", 600).run([waiting, Command("next", ("touch", "next"))]) == [
        "waiting",
        "next",
    ]
    assert read(tmp_path / "out") == [("waiting", -signal.SIGKILL)] and not (tmp_path / "next").exists()


def test_files_of_this_project_are_found():
    names = [command.name for command in gpu_tests.gpu_tests([])]
    assert "tests/training/test_passes.py" in names
    assert "tests/decoding/test_sampling.py" not in names
