"""scripts/gpu_tests.py finds what needs a GPU, and goes on where it was cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import gpu_tests


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A project of three test files, two of them for a GPU, one of these failing until a file `mended` exists."""
    tests = tmp_path / "tests"
    tests.mkdir()
    mark = "import pytest, pathlib\n@pytest.mark.gpu\n"
    (tests / "test_good.py").write_text(mark + "def test_it(): pass\n")
    (tests / "test_bad.py").write_text(mark + "def test_it(): assert pathlib.Path('mended').exists()\n")
    (tests / "test_cpu.py").write_text("def test_it(): raise SystemExit(9)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    return tmp_path


def read(out: Path) -> dict[str, int]:
    return {line["file"]: line["exit_code"] for line in map(json.loads, out.read_text().splitlines())}


def test_only_failed_files_run_again(world, capsys):
    out = world / "out.jsonl"
    assert gpu_tests.main(["--out", str(out)]) == 1
    assert read(out) == {"tests/test_good.py": 0, "tests/test_bad.py": 1}
    printed = capsys.readouterr().out
    assert "AssertionError" in printed and "not: tests/test_bad.py" in printed
    (world / "mended").touch()
    assert gpu_tests.main(["--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 3
    assert "2 of 2 files passed" in capsys.readouterr().out


def test_words_choose_files(world):
    assert gpu_tests.main(["--out", str(world / "out"), "good"]) == 0
    assert read(world / "out") == {"tests/test_good.py": 0}


def test_nothing_starts_when_the_time_is_over(world):
    assert gpu_tests.main(["--out", str(world / "out"), "--limit-s", "0"]) == 1
    assert not (world / "out").exists()


def test_a_file_that_takes_too_long_is_ended(world, monkeypatch):
    (world / "tests" / "test_bad.py").write_text(
        "import pytest, select\n@pytest.mark.gpu\ndef test_it(): select.select([], [], [])\n"
    )
    monkeypatch.setattr(gpu_tests, "FILE_S", 3.0)
    assert gpu_tests.main(["--out", str(world / "out"), "bad"]) == 1
    assert read(world / "out")["tests/test_bad.py"] < 0


def test_files_of_this_project_are_found():
    names = [str(name) for name in gpu_tests.gpu_files([])]
    assert "tests/training/test_passes.py" in names
    assert "tests/decoding/test_sampling.py" not in names
