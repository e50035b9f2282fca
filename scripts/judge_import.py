"""Last part of `scripts/judge`: helixctl reads what another package wrote of the same drafter, and finds it equal."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from helixctl.checkpoint.check import check_published
from helixctl.checkpoint.published import open_published

UNSAID = {"target", "target_architectures", "num_target_layers", "max_positions"}
"""What not every format says."""


def main() -> int:
    """Compare configuration and tensors, and show what `export --check` says of the folder."""
    work = Path(sys.argv[1])
    reference = json.loads((work / "reference.json").read_text(encoding="utf-8"))
    written, ours = open_published(work / "written"), open_published(Path(reference["export"]))
    one, other = asdict(written.describe()), asdict(ours.describe())
    wrong = [f"{key}: {one[key]} is not {other[key]}" for key in other if key not in UNSAID and one[key] != other[key]]
    read, expected = written.load_tensors(), ours.load_tensors()
    wrong += sorted(read.keys() ^ expected.keys())
    wrong += [n for n in read.keys() & expected.keys() if not torch.equal(read[n].bfloat16(), expected[n].bfloat16())]
    print(f"read back by helixctl ({written.format})  {'DIFFERS ' + '; '.join(wrong) if wrong else 'equal'}")
    for finding in check_published(work / "written").findings:
        print(f"  {finding.severity} ({', '.join(finding.engines) or 'all'}): {finding.message}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
