"""Every architecture of docs/targets.md: five steps, lossless decoding, exports; and the page says just that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.training.targets import CASES, HEADER, Case, try_target


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_target(case: Case, tmp_path: Path) -> None:
    outcome = try_target(case, tmp_path)
    assert outcome.trained
    assert outcome.greedy == ("not decoded" if case.name == "LFM2" else "the target's own")
    page = (ROOT / "docs/targets.md").read_text(encoding="utf-8")
    assert outcome.row() in page.splitlines(), "docs/targets.md is old: run python -m scripts.targets"


def test_the_page_has_no_other_rows() -> None:
    lines = (ROOT / "docs/targets.md").read_text(encoding="utf-8").splitlines()
    assert all(line in lines for line in HEADER)
    assert len([line for line in lines if line.startswith("| ")]) == len(CASES) + 1
