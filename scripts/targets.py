"""Writes docs/targets.md: trains on, decodes and exports for a tiny random target of every architecture in the tests.

python -m scripts.targets
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import transformers

from tests.training.targets import CASES, HEADER, STEPS, try_target

PAGE = Path("docs/targets.md")
TEXT = f"""\
# Targets

What was tried: for each row a tiny random model of that architecture (4 layers, float32, CPU), a drafter trained on
it for {STEPS} steps, its proofs, greedy decoding with and without it, and both exports, judged by
`helixctl export --check`.
The table is written by `python -m scripts.targets` and held against the tests by `tests/training/test_targets.py`. It
says that the mechanics are right, not how much a drafter gains. Real models that were trained on stand in
[benchmarks.md](benchmarks.md).

"read by" means that the engine finds every key and computes what the drafter learned, as far as its source says.
z-lab's code, speculators and SpecForge were run on exports ([interop.md](interop.md)); vLLM and SGLang were read, not
run. Targets with scaled embeddings need a look: z-lab's own code alone has a key for the scale. SpecForge calls the
target's embedding module, which scales by itself in Gemma and not in Granite, and SGLang may do so; vLLM and
speculators take raw rows, for which `drafter.scale_embeddings: false` trains.

"""


def main() -> None:
    """Try every case and write the page."""
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(try_target(case, Path(folder)).row())
        print(rows[-1], flush=True)
    versions = f"transformers {transformers.__version__}."
    PAGE.write_text(TEXT + "\n".join([*HEADER, *rows]) + f"\n\nTried with {versions}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
