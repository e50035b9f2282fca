"""A headless browser for pages: what it builds of a file, what a file looks like from outside, a picture."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)

CHARTS = """
  const charts = [...page.querySelectorAll("svg.chart")].map(svg => {
    const box = svg.getBoundingClientRect(), line = svg.querySelector("polyline, rect");
    return box.width > 100 && box.height > 50 && line.getBBox().width > 0;
  });
  const fits = page.documentElement.scrollWidth <= page.documentElement.clientWidth;
"""


def browse(page: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Open a page with a profile of its own beside it."""
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--allow-file-access-from-files",
    ]
    options += [f"--user-data-dir={page.parent / 'browser'}", *words]
    command = [str(BROWSER), *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def look_at(page: Path, **more: str) -> dict[str, Any]:
    """What a page that allows no script shows: a second page looks at it through a frame.

    Args:
        page: An HTML file; the second page is written beside it.
        more: JavaScript expressions over ``page``, its document, by name.

    Returns:
        title; charts: whether each is drawn; fits: nothing is cut on the right; and ``more``.
    """
    wanted = ", ".join(["title: page.title", "charts", "fits", *(f"{name}: {code}" for name, code in more.items())])
    look = f"""
      const page = document.querySelector("iframe").contentDocument;
      {CHARTS}
      document.body.innerHTML = JSON.stringify({{{wanted}}});
    """
    frame = f'<iframe src="{page.name}" width="1200" height="900" onload="look()"></iframe>'
    viewer = page.with_name("viewer.html")
    viewer.write_text(f"<!doctype html><body>{frame}<script>function look() {{ {look} }}</script></body>")
    done = browse(viewer, "--dump-dom", "--virtual-time-budget=5000")
    found = re.search(r"<body>(\{.*\})</body>", done.stdout)
    assert found, done.stdout + done.stderr
    seen: dict[str, Any] = json.loads(found[1])
    return seen
