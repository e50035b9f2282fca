"""Starts a run to be profiled, in a process and a run directory of its own, and ends it.

The run's own options stay as they are, but for its length: it goes on until the profile is done. Its directory is
thrown away afterwards, so no existing checkpoint is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from helixctl.errors import HelixError, UsageError
from helixctl.recipe.load import load_any_recipe

STATUS_EVERY_S = 0.2
LOG = "run.log"
_SCRATCH = ".run"
_MANY_STEPS = 1_000_000
_STOP_TIMEOUT_S = 20.0
_PR_SET_PDEATHSIG, _PR_SET_PTRACER = 1, 0x59616D61
_ANY_TRACER = ctypes.c_ulong(-1)


class RunFailed(HelixError):
    """The run ended before there was anything to look at; ``exit_code`` is its own."""


class Launched:
    """A run that was started to be looked at."""

    def __init__(self, child: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self._child = child
        self.run_dir = run_dir
        self._log = log

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    def log_tail(self, lines: int = 12) -> str:
        """The last of what it wrote."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.strip().splitlines()[-lines:])

    def raise_if_failed(self) -> None:
        """Raises RunFailed where it has ended by itself with an error."""
        code = self._child.wait(_STOP_TIMEOUT_S)
        if code:
            error = RunFailed(f"the run ended with exit code {code} before it could be profiled:\n{self.log_tail()}")
            error.exit_code = code if code > 0 else 1
            raise error

    def stop(self) -> None:
        """End it now, without a last checkpoint."""
        for _ in range(2):  # the first asks the run to finish its step, the second cancels
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(0.3)
        try:
            self._child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


@contextlib.contextmanager
def launched(recipe: Path, overrides: Sequence[str], folder: Path, *, cuda: bool = False) -> Iterator[Launched]:
    """Run ``recipe`` while the block runs; its log stays in ``folder``, all else that it writes is removed.

    With ``cuda`` the run traces its kernels when asked to (``cuda_request.py``).

    Raises:
        UsageError: ``folder`` cannot be written.
    """
    scratch = folder / _SCRATCH
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        log = (folder / LOG).open("wb")
    except OSError as error:
        fix = "choose another folder with --output"
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}", fix=fix) from error
    sets = [*overrides, f"run.dir={scratch}", *_endless(recipe, overrides)]
    words = [sys.executable, "-m", "helixctl", "profile", str(recipe), "--as-subject", *(["--cuda"] if cuda else [])]
    words += [word for entry in sets for word in ("--set", entry)]
    with log:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    run = Launched(child, scratch, folder / LOG)
    try:
        yield run
    finally:
        run.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def _endless(recipe: Path, overrides: Sequence[str]) -> list[str]:
    """Options that make the run outlast any look at it."""
    if load_any_recipe(recipe, overrides).kind == "causal_lm":
        return ["stages.0.epochs=null", "stages.0.tokens=null", f"stages.0.steps={_MANY_STEPS}"]
    return ["train.epochs=null", f"train.steps={_MANY_STEPS}"]


def become_subject() -> None:
    """Called by the run that is profiled: let py-spy look at it, and end with whoever started it.

    Where Yama restricts tracing, py-spy is only a sibling of the run and must be allowed; without Yama this is refused
    and not needed.
    """
    libc = ctypes.CDLL(None)
    unused = ctypes.c_ulong(0)
    libc.prctl(_PR_SET_PTRACER, _ANY_TRACER, unused, unused, unused)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), unused, unused, unused)
