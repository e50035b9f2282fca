"""Where the output goes may be closed, full, or know ASCII only: no traceback, and the right exit code."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from helixctl.checkpoint.atomic import write_output
from helixctl.engine.interrupt import interrupts_blocked
from helixctl.errors import UsageError
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
    assert start("docs", "errors", stdout=closed_pipe) == (141, "")


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


def test_files_that_the_user_names_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    """The system's own limit on file sizes stands in for a full disk."""
    (tmp_path / "old").write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        for name in ("old", "new", "deep/new"):
            with pytest.raises(UsageError, match=f"{name} cannot be written: File too large") as caught:
                write_output(tmp_path / name, "x" * 100, "-o", parents=True)
            assert "-o" in str(caught.value) and caught.value.page == "errors a-full-disk"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["old"]
    assert (tmp_path / "old").read_text() == "old"


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", "text", "-o")
    assert os.read(reading, 10) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reading)


def test_ctrl_c_reaches_no_process_that_was_started_while_it_is_blocked() -> None:
    with interrupts_blocked():
        text = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
        told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60).stdout
    assert told == "True\n" and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
