"""Where the output goes may be closed, full, or know ASCII only: no traceback, and the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.cli.runner import Runner
from tests.conftest import ROOT


def start(*words: str, stdout: int | IO[str]) -> tuple[int, str]:
    """Exit code, and what is on stderr."""
    command = [sys.executable, "-m", "helixctl", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("word", ["--version", "docs"])
def test_a_full_disk_behind_the_output_is_named(word: str) -> None:
    """One fails when the buffer is flushed at the end, the other at its first line."""
    with open("/dev/full", "w") as full:
        code, err = start(word, stdout=full)
    assert code == 1 and "Traceback" not in err and "Exception ignored" not in err
    assert "cannot write the output: No space left on device" in err and "docs errors a-full-disk" in err


def test_a_closed_pipe_ends_the_command_without_a_word(closed_pipe: int) -> None:
    assert start("docs", "errors", stdout=closed_pipe) == (1, "")


def test_closed_streams_are_as_good_as_dev_null() -> None:
    words = f"{sys.executable} -m helixctl"
    for command, code in ((f"{words} --version >&-", 0), (f"{words} plan none.yaml 2>&- >&-", 2)):
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_signs_that_the_output_does_not_know_are_replaced() -> None:
    text = "from helixctl.cli.process import run_process\nfrom helixctl.cli import render\n"
    text += "run_process(lambda: render.render_sample(['π', 'x'], [True, False], 'naïve'))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", text], env=environment, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(b"na?ve\n???x\n"), done.stderr


def test_a_folder_that_is_gone(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = run("doctor")
    assert done.code == 2 and "the current folder does not exist any more" in done.err
    assert run("--version").code == 0
    os.chdir(tmp_path)  # monkeypatch goes back to where the test began
