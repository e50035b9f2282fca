"""The program in docs/loaders.md runs as it stands there, with workers and two epochs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.data.test_streaming import write_text
from tests.gpt2 import save_gpt2


@pytest.mark.slow
def test_program_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "loaders.md").read_text(encoding="utf-8")
    [program] = page.split("```python\n")[1:]
    (tmp_path / "program.py").write_text(program.split("```")[0], encoding="utf-8")
    save_gpt2(tmp_path / "gpt2")
    (tmp_path / "data").mkdir()
    write_text(tmp_path / "data" / "train")
    write_text(tmp_path / "data" / "validation", num_files=1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    first, second = (line.split(" ", 2) for line in done.stdout.splitlines())
    assert (first[0], second[0]) == ("0", "1") and first[1] == second[1] != "0"
    assert "'documents': 30" in first[2] and "'documents': 60" in second[2]
