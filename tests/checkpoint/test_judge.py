"""Other people's code agrees with ours on an export. Needs the environments that `scripts/judge --tiny` makes once."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = "block logits, training forward"
EXPECTED = {
    "zlab": {"features of all taps", BLOCKS, "answer 0, accepted"},
    "speculators": {f"own format: {BLOCKS}", f"converted by it: {BLOCKS}", "config: aux_hidden_state_layer_ids"},
    "specforge": {BLOCKS, "answer 0, accepted"},
}


@pytest.mark.slow
@pytest.mark.parametrize("judge", EXPECTED)
def test_another_implementation_computes_the_same(tmp_path: Path, judge: str) -> None:
    if not (ROOT / f".venv-judge-{judge}" / ".judge-stamp").exists():
        pytest.skip(f"no .venv-judge-{judge}: run scripts/judge --tiny --judge {judge} once")
    report = tmp_path / "judge.json"
    command = ["bash", "scripts/judge", "--tiny", "--judge", judge, "--json", str(report)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(report.read_text())["verdicts"]
    assert all(verdict["equal"] for verdict in verdicts)
    assert {v["what"] for v in verdicts} >= EXPECTED[judge]
    if judge != "zlab":
        assert "read back by helixctl" in done.stdout
