"""How commands end: exit codes, tracebacks only for bugs, signals."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from helixctl.cli.process import heavy_imports, run_process
from helixctl.errors import HelixError, Interrupted, Problem, RecipeError, StageFailed

KILLS_ITSELF_WHEN_IMPORTED = """
import importlib.abc, importlib.machinery, os, signal, sys

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == {name!r} else None

    def exec_module(self, module):
        os.kill(os.getpid(), {signal})
        signal.pause()

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(autouse=True)
def _handlers_as_before():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def ends_with(command) -> int:
    with pytest.raises(SystemExit) as end:
        run_process(command)
    assert isinstance(end.value.code, int)
    return end.value.code


def raising(error: BaseException):
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (HelixError("broken", fix="mend it"), 1, "error: broken\n  fix: mend it\n"),
        (RecipeError([Problem("a.b", "is bad", "r.yaml:3", "x")]), 2, "r.yaml:3  a.b\n  is bad\n  fix: x\n"),
        (Interrupted(signal.SIGTERM, "stopped at step 3"), 143, "stopped at step 3"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "locked/x"),
            2,
            "error: locked/x: Permission denied\n  fix: ",
        ),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a"), 2, "error: a: File name too long\n  fix: "),
    ],
)
def test_errors_for_users_have_no_traceback(capsys, error, code, message):
    assert ends_with(raising(error)) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_bug_shows_its_traceback(capsys):
    for error in (
        ZeroDivisionError("oops"),
        FileNotFoundError(errno.ENOENT, "oops", "x"),
        OSError(errno.EBADF, "oops"),
    ):
        assert ends_with(raising(error)) == 1
        err = capsys.readouterr().err
        assert "Traceback" in err and type(error).__name__ in err and "oops" in err and "bug in helixctl" in err


def test_a_stage_that_fails_by_a_bug_shows_where(capsys):
    def command() -> None:
        try:
            raise KeyError("x")
        except KeyError as cause:
            raise StageFailed("target-0", cause) from cause

    assert ends_with(command) == 1
    err = capsys.readouterr().err
    assert "stage 'target-0' failed" in err and "Traceback" in err


def test_sigterm_unwinds_the_command():
    unwound = []

    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            unwound.append(True)

    assert ends_with(command) == 143
    assert unwound == [True]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_libraries_load_ends_at_once(number, code):
    text = KILLS_ITSELF_WHEN_IMPORTED.format(name="torch", signal=int(number))
    text += "from helixctl.cli.process import heavy_imports\nwith heavy_imports():\n    import torch\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")


def test_waiting_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    for given, expected in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if given:
            monkeypatch.setenv("OMP_WAIT_POLICY", given)
        with heavy_imports():
            assert os.environ["OMP_WAIT_POLICY"] == expected


def test_ctrl_c_while_the_command_line_loads():
    text = KILLS_ITSELF_WHEN_IMPORTED.format(name="helixctl.cli.app", signal=int(signal.SIGINT))
    done = subprocess.run(
        [sys.executable, "-c", f"{text}\nfrom helixctl.__main__ import main\nmain()"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "")
