"""Training as users run it, in a process of its own: kill -9, Ctrl-C, a full disk, exit codes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helixctl.checkpoint.store import latest_checkpoint, load_checkpoint
from tests.training.worlds import make_world, tensors_equal

TIMEOUT_S = 120


def start(recipe: Path, *arguments: str, preexec: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "helixctl", "train", str(recipe), "--set", "metrics.sinks=[console, jsonl]"]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=preexec,  # nothing of CUDA or of threads is in this process
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
    )


def until(process: subprocess.Popen[str], text: str) -> None:
    """Read the process's lines until one holds ``text``."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} never came: {''.join(seen)}")


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output


def settings(folder: Path, name: str) -> list[str]:
    values = [f"run.dir={folder / name}", "train.steps=20", "checkpoint.every_steps=2", "train.log_every_steps=1"]
    return [part for value in values for part in ("--set", value)]


def test_kill_and_resume_equals_an_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    recipe = make_world(tmp_path)
    code, output = end(start(recipe, *settings(tmp_path, "whole")))
    assert code == 0, output
    killed = start(recipe, *settings(tmp_path, "killed"))
    until(killed, "step 10/20")
    killed.kill()
    end(killed)
    found = latest_checkpoint(tmp_path / "killed" / "checkpoints")
    assert found.step is not None and 8 <= found.step < 20
    code, output = end(start(recipe, *settings(tmp_path, "killed"), "--resume"))
    assert code == 0, output
    whole, resumed = (
        load_checkpoint(tmp_path / name / "checkpoints" / "step-00000020") for name in ("whole", "killed")
    )
    assert tensors_equal(whole.tensors["drafter"], resumed.tensors["drafter"])
    assert tensors_equal(whole.tensors["optimizer"], resumed.tensors["optimizer"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_finishes_the_step_saves_and_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    recipe = make_world(tmp_path)
    process = start(recipe, *settings(tmp_path, "run"), "--set", "train.steps=100000")
    until(process, "step 5/")
    process.send_signal(number)
    found, output = end(process)
    assert found == code, output
    assert "--resume" in output and "Traceback" not in output
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").step is not None
    assert not (tmp_path / "run" / "run.pid").exists()


def test_a_full_disk_ends_the_run_with_a_clear_error_and_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    recipe = make_world(tmp_path)
    code, output = end(start(recipe, *settings(tmp_path, "run"), "--set", "train.steps=4"))
    assert code == 0, output
    largest = 32_768  # bytes a file may have: metrics fit, weights do not

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    arguments = [*settings(tmp_path, "full"), "--set", "train.steps=4"]
    code, output = end(start(recipe, *arguments, preexec=limit))
    assert code == 1, output
    assert "checkpoint" in output and "fix:" in output and "Traceback" not in output
    assert latest_checkpoint(tmp_path / "full" / "checkpoints").path is None
    assert not list((tmp_path / "full" / "checkpoints").glob("step-*"))
