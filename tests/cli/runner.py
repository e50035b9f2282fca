"""Runs the command line inside the test's own process."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

import pytest

from helixctl.cli.app import main


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


class Runner:
    """Call it with the words of a command line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *words: object) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["helixctl", *map(str, words)])
        before = signal.getsignal(signal.SIGTERM)
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            signal.signal(signal.SIGTERM, before)
        return Done(code, *self._capsys.readouterr())
