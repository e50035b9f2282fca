"""Every rule on code that has the bug and on code that has not: `cases/HXnnn.txt`, a file per rule.

A case begins with `=== bad` or `=== ok`; lines with `# bad` are those that the rule must report, and no others.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helixctl.doctor.catalog import all_rules, sections_of
from helixctl.doctor.finding import Finding
from helixctl.doctor.scan import FileTask, ScanOptions, scan_content
from helixctl.doctor.source import RuleOptions

CASES = Path(__file__).parent / "cases"
OPTIONS = RuleOptions(project_tokenizer="helix_lm.tokenizer.HelixTokenizer")
IN_PACKAGE = {"HX003", "HX020", "HX021"}
"""Rules whose level or silence depends on the file being part of a package."""


def scan(text: str, *, code: str = "", path: str = "train.py", options: RuleOptions = OPTIONS) -> list[Finding]:
    codes = tuple(rule.code for rule in all_rules())
    module = ("package", "train") if code in IN_PACKAGE else ("train",)
    return scan_content(text.encode(), FileTask(path, module), ScanOptions(codes, options))


def cases(code: str) -> list[tuple[str, str]]:
    parts = re.split(r"^=== (.*)\n", (CASES / f"{code}.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def expected(title: str, text: str) -> list[int]:
    named = re.search(r"line (\d+)", title)
    marked = [number for number, line in enumerate(text.split("\n"), 1) if line.endswith("# bad")]
    return [int(named[1])] if named else marked


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_rule_reports_bad_lines_and_no_others(rule) -> None:
    found = cases(rule.code)
    for title, text in found:
        lines = sorted({finding.line for finding in scan(text, code=rule.code) if finding.code == rule.code})
        assert lines == expected(title, text), f"{rule.code}: {title}"
    assert any(title.startswith("bad") and expected(title, text) for title, text in found), "no firing case"
    assert any(title.startswith("ok") for title, _ in found), "no silent case"


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_rule_is_documented(rule) -> None:
    assert re.fullmatch(r"HX\d{3}", rule.code)
    assert set(sections_of(rule.documentation)) == {"What it checks", "Why it matters", "Fix"}
    assert rule.documentation.startswith(f"{rule.code}: {rule.title}")
    assert rule.fix.endswith(".") and len(rule.fix) > 5


# ------------------------------------------------------------- the two bugs that the project was born from


def test_validation_loader_forked_after_cuda() -> None:
    text = (CASES / "born-trainer.txt").read_text(encoding="utf-8")
    errors = [finding for finding in scan(text) if finding.level == "error"]
    assert [(finding.code, finding.line) for finding in errors] == [("HX010", line_of(text, "loader = DataLoader("))]
    assert "line" in errors[0].message and "cuda" in errors[0].message.lower()


def test_gpt2_tokenizer_where_the_projects_own_is_required() -> None:
    text = (CASES / "born-tokenizer.txt").read_text(encoding="utf-8")
    errors = [finding for finding in scan(text) if finding.level == "error"]
    assert [(finding.code, finding.line) for finding in errors] == [("HX101", line_of(text, "AutoTokenizer.from"))]
    assert "HelixTokenizer is required" in errors[0].message


def test_tokenizer_is_nobodys_business_where_none_is_required() -> None:
    text = (CASES / "born-tokenizer.txt").read_text(encoding="utf-8")
    assert scan(text, options=RuleOptions()) == []


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.split("\n"), 1) if part in line)


# ------------------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize(
    ("text", "code", "level"),
    [
        ("import multiprocessing as mp\nmp.get_context('fork')\n", "HX002", "warning"),
        ("import torch, multiprocessing as mp\nmp.get_context('fork')\n", "HX002", "error"),
        ("from torch.utils.data import DataLoader\nd = DataLoader([], num_workers=2)\n", "HX010", "warning"),
        (
            "from torch.utils.data import DataLoader\ndef f(m, ds):\n m.to('cuda')\n DataLoader(ds, num_workers=2)\n",
            "HX010",
            "error",
        ),
    ],
)
def test_level_says_how_sure_the_rule_is(text: str, code: str, level: str) -> None:
    assert [finding.level for finding in scan(text) if finding.code == code] == [level]


def test_target_versions_change_what_is_wrong() -> None:
    text = "import torch\ntorch.load('x')\n"
    old = [f.level for f in scan(text, options=RuleOptions(target_torch=(2, 4))) if f.code == "HX061"]
    assert old == ["warning"]
    fork = "import torch, multiprocessing as mp\ndef main():\n    torch.cuda.init()\n    mp.Process(target=print)\n"
    assert "HX001" in {f.code for f in scan(fork)}
    assert "HX001" not in {f.code for f in scan(fork, options=RuleOptions(target_python=(3, 14)))}


def test_tests_may_ask_for_cuda_at_import() -> None:
    text = "import torch\nHAS = torch.cuda.is_available()\nSM = torch.cuda.get_device_capability()\n"
    assert {f.code for f in scan(text, code="HX020")} >= {"HX020", "HX021"}
    assert scan(text, code="HX020", path="tests/test_x.py") == []
