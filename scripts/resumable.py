"""Commands in order, several at once if they may, within a time limit; a second call goes on where the first one ended.

Every command that ends is one JSON line in a file. Those that succeeded are not run again. SIGTERM and the time limit
lose only what is under way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

MAX_CHARACTERS = 8000
"""Of what a command printed, from its end."""


@dataclass(frozen=True)
class Command:
    """Something to run from the project's root."""

    name: str
    words: tuple[str, ...]
    expected_s: float = 0.0
    """It is not started when less time is left."""
    limit_s: float = 240.0
    """It is ended when it takes longer."""


class Session:
    """Runs commands and writes down how each ended."""

    def __init__(self, root: Path, out: Path, limit_s: float) -> None:
        """``limit_s`` counts from now, for all commands together."""
        self._root, self._out, self._ends_at = root, out, time.monotonic() + limit_s
        self._lock = Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self.succeeded = self._succeeded_before()

    def run(self, commands: Sequence[Command], jobs: int = 1) -> list[str]:
        """Run what has not succeeded yet, ``jobs`` at once.

        Returns:
            Names of the commands that have not succeeded now or before.
        """
        before = signal.signal(signal.SIGTERM, lambda *_: self.end())
        try:
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(self._run, [command for command in commands if command.name not in self.succeeded]))
        finally:
            signal.signal(signal.SIGTERM, before)
        return [command.name for command in commands if command.name not in self.succeeded]

    def end(self) -> None:
        """Start nothing more, and end what runs."""
        self._ends_at = time.monotonic()
        for process in list(self._running):
            kill(process)

    def _run(self, command: Command) -> None:
        began_at = time.monotonic()
        left_s = self._ends_at - began_at
        if left_s <= command.expected_s:
            return
        process = subprocess.Popen(
            command.words,
            cwd=self._root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._running.add(process)
        try:
            text, _ = process.communicate(timeout=min(command.limit_s, left_s))
        except subprocess.TimeoutExpired:
            kill(process)
            text = process.communicate()[0] + f"\nended after {time.monotonic() - began_at:.0f} s"
        finally:
            self._running.discard(process)
        seconds = round(time.monotonic() - began_at, 1)
        line = {"name": command.name, "exit_code": process.returncode, "seconds": seconds}
        self._write({**line, "output": text[-MAX_CHARACTERS:]})

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            if line["exit_code"] == 0:
                self.succeeded.add(line["name"])
            with self._out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            said = line["output"].rstrip()
            print(f"== {line['name']}: exit code {line['exit_code']}, {line['seconds']} s")
            print(said if line["exit_code"] else said.rpartition("\n")[2], flush=True)

    def _succeeded_before(self) -> set[str]:
        lines = [json.loads(text) for text in self._out.read_text("utf-8").splitlines()] if self._out.exists() else []
        return {line["name"] for line in lines if line["exit_code"] == 0}


def kill(process: subprocess.Popen[str]) -> None:
    """End a command and the processes that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # the session of its own that it was started in


def parser_for(description: str | None, words: str) -> argparse.ArgumentParser:
    """The command line of a script that runs commands; ``words`` says what they choose by."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help=words)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; appended to")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds in all")
    return parser
