"""z-lab's own code agrees with ours on an export. Needs the environment that `scripts/judge --tiny` makes once."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-judge-zlab"


@pytest.mark.slow
@pytest.mark.skipif(not (VENV / ".judge-stamp").exists(), reason="no .venv-judge-zlab: run scripts/judge --tiny once")
def test_another_implementation_computes_the_same(tmp_path: Path) -> None:
    report = tmp_path / "judge.json"
    command = ["bash", "scripts/judge", "--tiny", "--json", str(report)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(report.read_text())["verdicts"]
    assert all(verdict["equal"] for verdict in verdicts)
    assert {v["what"] for v in verdicts} >= {"features of all taps", "block logits, training forward"}
