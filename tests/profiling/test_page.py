"""The page in a real browser, without a screen and without a network."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helixctl.metrics.page import STYLE
from tests.browser import BROWSER, browse, needs_browser


class Page(HTMLParser):
    """What a page holds: identifiers, tags, attributes, and the text of the heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.tags: list[str] = []
        self.state = ""
        self.loads: list[str] = []
        self.title = ""
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.ids.add(given.get("id", ""))
        self.state = given.get("data-state", self.state)
        self.loads += [given[name] for name in ("src", "href") if name in given]
        self._in_title = given.get("id") == "title"

    def handle_data(self, data: str) -> None:
        self.title += data if self._in_title else ""

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False


def test_the_page_loads_nothing_and_data_cannot_end_its_script(profiled):
    text = (profiled.folder / "profile.html").read_text(encoding="utf-8")
    assert Page(text).loads == []
    assert not re.search(r"https?://(?!www\.w3\.org|www\.speedscope)", text)
    assert text.count("</script>") == 1
    assert "/*DATA*/null" not in text
    assert STYLE in text, "it looks like the other pages"


@pytest.fixture(scope="module")
def shown(profiled, tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str]:
    """The page as the browser has built it, and what it wrote to its log."""
    if BROWSER is None:
        pytest.skip("no browser")
    page = shutil.copy(profiled.folder / "profile.html", tmp_path_factory.mktemp("page"))
    done = browse(Path(page), "--enable-logging=stderr", "--dump-dom")
    return Page(done.stdout), done.stderr


def test_the_page_builds_itself_without_an_error(shown):
    page, log = shown
    assert page.state == "shown", page.state
    assert "Uncaught" not in log


def test_the_page_shows_verdict_tables_timelines_and_flame_graph(shown, profiled):
    page, _ = shown
    assert page.title == profiled.report["verdict"]["title"]
    assert {"verdict", "stages", "channels", "timelines", "flame"} <= page.ids
    assert page.tags.count("path") >= 8  # areas of the timelines
    assert page.tags.count("rect") >= 8  # frames


def test_text_from_the_profiled_process_stays_text(shown):
    page, _ = shown
    assert "b" not in page.tags


@needs_browser
def test_a_picture_of_the_page_is_not_blank(profiled, tmp_path: Path):
    page, picture = tmp_path / "profile.html", tmp_path / "page.png"
    shutil.copy(profiled.folder / "profile.html", page)
    browse(page, "--window-size=1200,1600", f"--screenshot={picture}")
    assert picture.stat().st_size > 30_000  # an empty page of this size takes 7 kB
