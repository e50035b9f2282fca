"""Every measurement of docs/benchmarks.md that needs a GPU and no data, most important first, one after the other.

    scripts/benchmark all --out gpu_benchmarks.jsonl          what fits 9 minutes; a second call goes on behind it
    scripts/benchmark all --out gpu_benchmarks.jsonl 8b lm    only those with one of these words in their name

Some compile for a minute first. Those of a real target and real answers are commands of their own: `scripts/benchmark
ablation` and `scripts/regenerate_benchmark.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.resumable import Command, Session, parser_for

ROOT = Path(__file__).resolve().parents[1]


def benchmarks(folder: Path, num_gpus: int) -> list[Command]:
    """All of them that so many GPUs can run; ``folder`` is where they write reports."""
    fp8 = ("--set", "target.quantization=fp8")
    topologies = ("--out", str(folder / "topologies.jsonl"), "--limit-s", "400", "--only", "8b")
    return [
        *(two_gpus() if num_gpus >= 2 else ()),
        _python("topologies", "scripts.topologies", *topologies, expected_s=300),
        _shape("8b packed", "8b", "--mean-length", "600", expected_s=130),
        _python("profile 0.6b-small", "scripts.launch_bound", str(folder / "launch_bound"), expected_s=250),
        _python("lm 87m", "scripts.lm_baseline", expected_s=180),
        _shape("0.6b packed", "0.6b", "--mean-length", "600", expected_s=100),
        _shape("8b", "8b", expected_s=130),
        _shape("8b fp8", "8b", *fp8, expected_s=140),
        _shape("0.6b", "0.6b", expected_s=90),
        _shape("0.6b-small", "0.6b-small", expected_s=80),
        _shape("0.6b fp8", "0.6b", *fp8, expected_s=100),
        _python("warm-up 8b", "scripts.warmup_shape", "8b", expected_s=120),
        Command("circle", ("bash", "scripts/circle"), expected_s=270, limit_s=540),
    ]


def two_gpus() -> list[Command]:
    """Target and drafter with a GPU each, then both on both GPUs."""
    apart = ("--set", "pipeline.targets=[cuda:0]", "--set", "pipeline.drafters=[cuda:1]")
    pinned = ("--set", "pipeline.transport=pinned")
    return [
        _shape("8b apart", "8b", *apart, expected_s=130),
        _shape("0.6b apart", "0.6b", *apart, expected_s=90),
        _shape("0.6b-small apart", "0.6b-small", *apart, expected_s=80),
        _shape("8b apart, pinned", "8b", *apart, *pinned, "--only", "pipeline", expected_s=100),
        _shape("0.6b apart, pinned", "0.6b", *apart, *pinned, "--only", "pipeline", expected_s=70),
        _shape("0.6b-small apart, pinned", "0.6b-small", *apart, *pinned, "--only", "pipeline", expected_s=60),
    ]


def _shape(name: str, *words: str, expected_s: float) -> Command:
    return _python(f"shape {name}", "scripts.benchmark_shape", *words, expected_s=expected_s)


def _python(name: str, module: str, *words: str, expected_s: float) -> Command:
    return Command(name, (sys.executable, "-m", module, *words), expected_s, limit_s=2 * expected_s)


def main(words: Sequence[str] | None = None) -> int:
    """Run them; 0 when all succeeded, now or before, 1 else."""
    options = parser_for(__doc__, "of names").parse_args(words)
    chosen = options.words
    commands = [
        command
        for command in benchmarks(options.out.resolve().parent, torch.cuda.device_count())
        if not chosen or any(word in command.name for word in chosen)
    ]
    left = Session(ROOT, options.out, options.limit_s).run(commands)
    print(f"{len(commands) - len(left)} of {len(commands)} were measured", *left, sep="\nnot: ")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
