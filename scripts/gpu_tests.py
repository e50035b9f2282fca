"""All tests that need a GPU, one process per file, several files at once; goes on where an earlier call ended.

    python -m scripts.gpu_tests --out gpu_tests.jsonl                  those marked `gpu`
    python -m scripts.gpu_tests --out gpu_tests.jsonl decoding warmup  only files with one of these words in their path

A file has a process of its own because torch counts recompilations, and keeps memory, per process.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.resumable import Command, Session, parser_for

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"^ *(?:@|pytestmark = |marks=)\[?pytest\.mark\.gpu\b", re.MULTILINE)


def gpu_tests(words: Sequence[str]) -> list[Command]:
    """A command per file under ``tests/`` with a test marked ``gpu``; with one of ``words`` in its path, if any."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if MARKED.search(path.read_text("utf-8")))
    names = [str(path.relative_to(ROOT)) for path in files]
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--show-capture=no")
    return [Command(name, (*pytest, name)) for name in names if not words or any(word in name for word in words)]


def main(words: Sequence[str] | None = None) -> int:
    """Run them; 0 when all files passed, now or before, 1 else."""
    parser = parser_for(__doc__, "of paths of test files")
    parser.add_argument("--jobs", type=int, default=4, help="files at once")
    options = parser.parse_args(words)
    commands = gpu_tests(options.words)
    left = Session(ROOT, options.out, options.limit_s).run(commands, options.jobs)
    print(f"{len(commands) - len(left)} of {len(commands)} files passed", *left, sep="\nnot: ")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
