"""What is installed is enough: the wheel carries the pages that errors name, and everything else that is no Python."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the wheel, as pip would put it into site-packages."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("needs hatchling: pip install 'helixctl[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def helixctl(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line as it was installed, far from the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "helixctl", *words]
    return subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True, timeout=60)


def test_the_wheel_holds_what_the_package_and_the_docs_hold(installed: Path) -> None:
    known = {path.relative_to(ROOT / "helixctl") for path in (ROOT / "helixctl").rglob("*") if path.is_file()}
    wanted = {path for path in known if path.suffix != ".pyc"}
    wanted |= {path.relative_to(ROOT) for path in (ROOT / "docs").iterdir()}
    found = {path.relative_to(installed / "helixctl") for path in (installed / "helixctl").rglob("*") if path.is_file()}
    assert found == wanted


def test_the_page_that_an_error_names_can_be_read_without_the_checkout(installed: Path) -> None:
    failed = helixctl(installed, "plan", "missing.yaml")
    more = failed.stderr.rstrip().splitlines()[-1]
    assert failed.returncode == 2 and more.strip() == "more: helixctl docs errors recipeerror"
    done = helixctl(installed, *more.split()[2:])
    assert done.returncode == 0 and done.stdout.startswith("## RecipeError\n")
