"""The page and the text about a validation: every part, nothing from elsewhere, drawn by a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from helixctl.decoding.distribution import SampleCheck
from helixctl.errors import UsageError
from helixctl.metrics.history import History
from helixctl.training.validation_page import make_text, make_validation_page, write_validation
from tests.browser import look_at, needs_browser
from tests.chats import write_jsonl
from tests.cli.runner import Runner
from tests.training.conftest import TrainedWorld
from tests.training.validations import CONFIDENCE, VALIDATED

HISTORY = History({"val/accept_len": ((10, 1.1), (20, 1.5), (30, 1.4)), "val/accept_len_live": ((10, 1.0), (20, 1.3))})
BARE = replace(VALIDATED, prompts=(), sources=(), total=None, settings=None, greedy=(), proofs=(), held_out={})


def test_the_page_has_every_part_and_fetches_nothing() -> None:
    text = make_validation_page(VALIDATED, HISTORY)
    for heading in ("Sources", "Score by source", "Acceptance by position", "Acceptance where reached", "Checks"):
        assert f"<h2>{heading}</h2>" in text, heading
    for heading in ("Acceptance length over training", "Settings", "Held-out rows", "All 2 prompts"):
        assert f"<h2>{heading}</h2>" in text, heading
    assert text.count('<svg class="chart"') == 4
    assert 'class="verdict fail"' in text and "Failed: taps." in text and "mt/81" in text
    assert not re.search(r"(src|href|url)\s*[=(]", text) and "<script" not in text


def test_what_people_and_models_wrote_is_text_not_markup() -> None:
    text = make_validation_page(VALIDATED, HISTORY)
    assert "And &lt;b&gt;2+2&lt;/b&gt;?" in text and "<i>4" not in text


def test_a_good_result_says_so() -> None:
    good = replace(VALIDATED, proofs=VALIDATED.proofs[:1])
    text = make_validation_page(good, History())
    assert 'class="verdict good"' in text and "All 1 proofs passed." in text
    assert "over training" not in text


def test_a_result_without_decoding_has_a_page_and_a_text_too() -> None:
    assert "<svg" not in make_validation_page(BARE, History()) and "Nothing was decoded." in make_text(BARE, History())


def test_samples_are_told() -> None:
    for p_value, word in ((0.5, "are drawn from"), (1e-9, "are NOT from")):
        sampled = replace(VALIDATED, greedy=(), samples=SampleCheck(1000, 19.0, p_value, 0))
        assert word in make_text(sampled, History()) and word in make_validation_page(sampled, History())


def test_the_text_has_tables_and_bars() -> None:
    text = make_text(VALIDATED, HISTORY)
    lines = text.splitlines()
    assert "| math | 2 | 3 | 40 | 2.300 | 2.200 | 3.000 | 45.8 % | 3 of 3 |" in lines
    assert "| math | q\\|1 | 2 | 4 | 2 | 2.500 | 1 of 2 |" in lines
    assert "| talk | mt/81 | 1 | 1 | 0 | – | 0 of 1 |" in lines
    assert (
        f"| 1 | `{'█' * 15}{'░' * 5}` 75.0 % | `{'█' * 8}{'░' * 12}` 37.5 % | `{'█' * 12}{'░' * 8}` 62.5 % |" in lines
    )
    assert "| val/accept_len | ▁█▆ | 1.400 |" in lines
    for heading in ("Sources", "Acceptance by position", "Over training", "Checks", "Prompts"):
        assert f"## {heading}" in lines
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_what_the_drafter_expected_is_drawn_and_listed() -> None:
    asked = replace(VALIDATED, confidence=CONFIDENCE)
    page = make_validation_page(asked, HISTORY)
    assert page.count('<svg class="chart"') == 5 and "<h2>Accepted by what the drafter expected</h2>" in page
    lines = make_text(asked, HISTORY).splitlines()
    assert "## Confidence" in lines and "## Confidence" not in make_text(VALIDATED, HISTORY)
    assert "| 0.2 to 0.3 | 10 | 0.250 | 0.300 | – | – | – |" in lines
    assert "| 0.8 to 0.9 | 30 | 0.850 | 0.900 | 30 | 0.800 | 0.600 |" in lines
    assert "| all | 40 | 0.500 | 0.450 | 30 | 0.800 | 0.600 |" in lines
    told = "expected calibration error: 0.050 up to the draft, 0.200 where reached"
    assert told in page and any(line.endswith(told) for line in lines)


def test_the_command_writes_what_it_is_told(trained: TrainedWorld, run: Runner, tmp_path: Path) -> None:
    prompts = write_jsonl(tmp_path / "talk.jsonl", [{"turns": ["count to 3", "again"]}])
    page, text = tmp_path / "page.html", tmp_path / "page.md"
    told = ("--report", page, "--report", text, "--acceptance-only")
    done = run("validate", trained.recipe, "--bench", prompts, *told)
    assert done.code == 0 and "talk" in done.out and "accepted by position" in done.out
    assert "<h2>Acceptance length over training</h2>" in page.read_text() and "| talk | 1 | 2 |" in text.read_text()


@pytest.mark.parametrize(
    ("name", "words"), [("page.pdf", "must be one of .html, .md"), ("no/page.md", "cannot be written")]
)
def test_a_report_that_cannot_be_written_is_refused_at_once(
    trained: TrainedWorld, run: Runner, tmp_path: Path, name: str, words: str
) -> None:
    done = run("validate", trained.recipe, "--report", tmp_path / name)
    assert done.code == 2 and words in done.err
    with pytest.raises(UsageError, match="cannot be written"):
        write_validation(BARE, tmp_path / "no" / "page.md", tmp_path)


@pytest.mark.slow
@needs_browser
def test_a_real_browser_draws_the_page(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(make_validation_page(VALIDATED, HISTORY))
    seen = look_at(
        tmp_path / "page.html",
        draft='getComputedStyle(page.querySelector(".draft")).color',
        rows='page.querySelectorAll("section.wide table tr").length',
    )
    assert seen["title"] == "Validation of step-100, step 100" and seen["fits"]
    assert seen["charts"] == [True] * 4 and seen["rows"] == 4
    assert seen["draft"] != "rgb(0, 0, 0)"
