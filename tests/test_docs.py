"""The documentation: every error has its place, generated pages are current, links lead somewhere, it builds."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from helixctl.cli.pages import find_pages, slug
from helixctl.errors import DataError, HelixError, Problem, RecipeError, StageFailed
from scripts import reference
from tests.cli.runner import Runner
from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def anchors(page: Path) -> set[str]:
    """Of the headings, outside of fenced blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def classes_and_pages() -> tuple[set[str], set[str]]:
    """Names of all classes of errors in the package, and every page that some error names, read from the source."""
    bases: dict[str, list[str]] = {}
    pages: set[str] = set()
    for file in (ROOT / "helixctl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.match(r"[\w-]+\.md#\w", node.value)
            ):
                pages.add(node.value)
    errors = {"HelixError"}
    while more := {name for name, own in bases.items() if name not in errors and errors & {*own}}:
        errors |= more
    return errors - {"HelixError"}, pages


def test_every_error_has_its_place_in_the_documentation() -> None:
    names, pages = classes_and_pages()
    assert len(names) > 10 and len(pages) > 1
    missing = {name.lower() for name in names} - anchors(DOCS / "errors.md")
    assert not missing, f"docs/errors.md has no section for {sorted(missing)}"
    for page in pages:
        name, _, anchor = page.partition("#")
        assert anchor in anchors(DOCS / name), f"an error names docs/{page}"


def test_an_error_names_its_page() -> None:
    assert HelixError("x").page == "errors helixerror"
    assert RecipeError([Problem("a", "b"), Problem("c", "d", see="e.md#f")]).page == "e f"
    assert RecipeError([Problem("run", "is odd")]).page == "errors recipeerror"
    assert DataError("x", see="other.md#place").page == "other place"
    assert StageFailed("target-0", DataError("x")).page == "errors dataerror"
    assert StageFailed("target-0", KeyError("x")).page == "errors stagefailed"


@pytest.mark.parametrize(
    ("words", "section"),
    [
        (["plan", "missing.yaml"], "RecipeError"),
        (["report", "missing"], "UsageError"),
        (["doctor", "missing"], "UsageError"),
    ],
)
def test_a_message_ends_with_a_command_that_prints_its_page(
    words: list[str], section: str, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    last = done.err.rstrip().splitlines()[-1]
    found = re.fullmatch(r" *more: helixctl (docs errors \w+)", last)
    assert done.code and found, done.err
    assert run(*found[1].split()).out.startswith(f"## {section}\n")


def test_pages_and_sections_can_be_printed(run: Runner) -> None:
    listed = run("docs").out
    assert {path.name for path in find_pages().values()} == {path.name for path in PAGES}
    assert all(f" {path.stem} " in listed for path in PAGES)
    assert run("docs", "errors.md").out == (DOCS / "errors.md").read_text(encoding="utf-8")
    for page in PAGES:
        for anchor in sorted(anchors(page))[::8]:
            done = run("docs", page.stem, anchor)
            assert done.code == 0 and slug(done.out.splitlines()[0].lstrip("#")) == anchor


@pytest.mark.parametrize(
    ("words", "fix"),
    [(["erors"], "did you mean 'errors'?"), (["errors", "recipe-error"], "did you mean 'recipeerror'?")],
)
def test_a_page_that_does_not_exist(words: list[str], fix: str, run: Runner) -> None:
    done = run("docs", *words)
    assert done.code == 2 and fix in done.err


@pytest.mark.parametrize("name", ["recipe.md", "rules.md"])
def test_generated_pages_are_current(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == reference.pages()[name], f"docs/{name} is old: run python -m scripts.reference"


def test_every_option_and_every_rule_is_in_the_reference() -> None:
    from helixctl.doctor.catalog import all_rules
    from helixctl.recipe.explain import all_keys
    from helixctl.recipe.schema import Recipe

    recipe, rules = reference.recipe_page(), reference.rules_page()
    assert all(f"| `{key.rpartition('.')[2]}` |" in recipe for key in all_keys(Recipe) if "." in key)
    assert "`--features`" in recipe or "prepare --features" in recipe
    assert all(f"## {rule.code} {rule.name}" in rules and rule.title in rules for rule in all_rules())


def test_links_and_anchors_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "README.md"]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if link.startswith("http"):
                continue
            name, _, anchor = link.partition("#")
            other = page.parent / name if name else page
            assert other.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(other), f"{page.name} links to {link}"


def test_every_page_has_its_place_on_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": ([\w-]+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES], "mkdocs.yml: nav holds every page of docs/ once"
    assert yaml.safe_load(text)["docs_dir"] == "docs"


def test_the_picture_shows_every_stage() -> None:
    tree = ElementTree.parse(DOCS / "pipeline.svg")
    words = " ".join(text for element in tree.iter() for text in element.itertext())
    assert all(stage in words for stage in ("reader", "target 1", "postprocess 1", "drafter 1", "slot 3", "gradients"))
    assert "http" not in (DOCS / "pipeline.svg").read_text().replace("http://www.w3.org/2000/svg", "")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("needs mkdocs-material: pip install 'helixctl[docs]'")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        inside = "index.html" if page.stem == "index" else f"{page.stem}/index.html"
        assert (tmp_path / "site" / inside).is_file()
