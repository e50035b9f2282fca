"""Every measurement of docs/benchmarks.md that needs a GPU and no data, most important first, one after the other.

    scripts/benchmark all --out gpu_benchmarks.jsonl          what fits 9 minutes; a second call goes on behind it
    scripts/benchmark all --out gpu_benchmarks.jsonl 8b lm    only those with one of these words in their name

Some compile for a minute first. Those of a real target and real answers are commands of their own: `scripts/benchmark
ablation`, `scripts/regenerate_benchmark.py` and `scripts/circle`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.resumable import Command, Session, parser_for

ROOT = Path(__file__).resolve().parents[1]


def benchmarks(folder: Path) -> list[Command]:
    """All of them; ``folder`` is where they write reports."""
    fp8 = ("--set", "target.quantization=fp8")
    topologies = ("--out", str(folder / "topologies.jsonl"), "--limit-s", "280", "--only", "alone,together,fails")
    return [
        _python("shape 8b packed", "scripts.benchmark_shape", "8b", "--mean-length", "600", expected_s=130),
        _python("profile 0.6b-small", "scripts.launch_bound", str(folder / "launch_bound"), expected_s=150),
        _python("lm 87m", "scripts.lm_baseline", expected_s=180),
        _python("shape 0.6b packed", "scripts.benchmark_shape", "0.6b", "--mean-length", "600", expected_s=100),
        _python("shape 8b", "scripts.benchmark_shape", "8b", expected_s=130),
        _python("shape 8b fp8", "scripts.benchmark_shape", "8b", *fp8, expected_s=140),
        _python("shape 0.6b", "scripts.benchmark_shape", "0.6b", expected_s=90),
        _python("shape 0.6b-small", "scripts.benchmark_shape", "0.6b-small", expected_s=80),
        _python("shape 0.6b fp8", "scripts.benchmark_shape", "0.6b", *fp8, expected_s=100),
        _python("topologies", "scripts.topologies", *topologies, expected_s=290),
        _python("warm-up 8b", "scripts.warmup_shape", "8b", expected_s=120),
    ]


def _python(name: str, module: str, *words: str, expected_s: float) -> Command:
    return Command(name, (sys.executable, "-m", module, *words), expected_s, limit_s=2 * expected_s)


def main(words: Sequence[str] | None = None) -> int:
    """Run them; 0 when all succeeded, now or before, 1 else."""
    options = parser_for(__doc__, "of names").parse_args(words)
    chosen = options.words
    commands = [
        command
        for command in benchmarks(options.out.resolve().parent)
        if not chosen or any(word in command.name for word in chosen)
    ]
    left = Session(ROOT, options.out, options.limit_s).run(commands)
    print(f"{len(commands) - len(left)} of {len(commands)} were measured", *left, sep="\nnot: ")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
