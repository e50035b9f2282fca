"""All tests that need a GPU, one process per file, several files at once; goes on where an earlier call ended.

    python -m scripts.gpu_tests --out gpu_tests.jsonl                 those marked `gpu`
    python -m scripts.gpu_tests --out gpu_tests.jsonl decoding warmup  only files with one of these words in their path

A file has a process of its own because torch counts recompilations, and keeps memory, per process. Every file that ends
is one JSON line in --out; those that passed are not run again. SIGTERM and the time limit lose only what is under way.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE_S = 240.0
"""A file that takes longer is ended."""
MAX_CHARACTERS = 8000
"""Of what a failed file printed, from its end."""
MARKED = re.compile(r"pytest\.mark\.gpu\b")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def gpu_files(words: Sequence[str]) -> list[Path]:
    """Files under ``tests/`` with a test marked ``gpu``; with one of ``words`` in the path, if any are given."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if MARKED.search(path.read_text("utf-8")))
    names = [path.relative_to(ROOT) for path in files]
    return [name for name in names if not words or any(word in str(name) for word in words)]


def passed_before(out: Path) -> set[str]:
    """Files that an earlier call saw pass."""
    if not out.exists():
        return set()
    lines = [json.loads(text) for text in out.read_text("utf-8").splitlines()]
    return {line["file"] for line in lines if line["exit_code"] == 0}


class Session:
    """Runs files within a time limit and writes down how each ended."""

    def __init__(self, out: Path, limit_s: float) -> None:
        """``limit_s`` counts from now."""
        self._out, self._ends_at = out, time.monotonic() + limit_s
        self._lock = Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self.lines: list[dict[str, Any]] = []

    def run(self, file: Path) -> None:
        """One file, unless the time is over."""
        left_s = min(FILE_S, self._ends_at - time.monotonic())
        if left_s <= 0:
            return
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", str(file)]
        began_at = time.monotonic()
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        with self._lock:
            self._processes.add(process)
        try:
            text, _ = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            kill(process)
            text, _ = process.communicate()
            text += f"\nended after {left_s:.0f} s"
        self._write(file, process.returncode, time.monotonic() - began_at, text)

    def end(self) -> None:
        """Start nothing more, and end what runs."""
        self._ends_at = time.monotonic()
        with self._lock:
            for process in self._processes:
                kill(process)

    def _write(self, file: Path, exit_code: int, seconds: float, text: str) -> None:
        counts = {kind.rstrip("s"): int(number) for number, kind in COUNTS.findall(text.strip().rpartition("\n")[2])}
        line = {"file": str(file), "exit_code": exit_code, "seconds": round(seconds, 1), **counts}
        with self._lock:
            self.lines.append(line)
            with self._out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            if exit_code:
                print(text[-MAX_CHARACTERS:], flush=True)


def kill(process: subprocess.Popen[str]) -> None:
    """End a file's process and those that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # the session of its own that it was started in


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of paths of test files")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; appended to")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--jobs", type=int, default=4, help="files at once")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run them; 0 when all files passed, now or before, 1 else."""
    options = parse_options(words)
    files, passed = gpu_files(options.words), passed_before(options.out)
    session = Session(options.out, options.limit_s)
    signal.signal(signal.SIGTERM, lambda *_: session.end())
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(session.run, [file for file in files if str(file) not in passed]))
    passed |= {line["file"] for line in session.lines if line["exit_code"] == 0}
    left = [str(file) for file in files if str(file) not in passed]
    print(f"{len(files) - len(left)} of {len(files)} files passed" + "".join(f"\nnot: {name}" for name in left))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
