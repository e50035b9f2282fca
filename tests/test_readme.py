"""Every command line in README.md and docs/ does what it says, on a tiny target."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chats import conversations, save_target, write_jsonl
from tests.cli.runner import Runner
from tests.conftest import ROOT
from tests.lm_worlds import write_lm_world

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
INIT = "helixctl init path/to/target data/train.jsonl -o recipe.yaml"
PUBLISHED = {"DRAFTER": "runs/target-dflash/export", "OUTPUT": "converted", "RUN": "runs/target-dflash"}
PLACEHOLDERS = {
    "RECIPE": "recipe.yaml",
    "MODEL": "path/to/target",
    "DATA": "data/train.jsonl",
    "[PATHS]": "src",
    **PUBLISHED,
}
SMALLER = {
    "  epochs: 6": "  steps: 2",
    "  every_steps: 500": "  every_steps: 2",
    "  num_layers: 4": "  num_layers: 1\n  num_taps: 4",
    "  block_size: 16": "  block_size: 4",
    "  seq_len:": "  workers: 0\n  seq_len:",
    "    fraction: 0.05": "    fraction: 0.2",
    "validation:\n  every": "pipeline: {threads: 1}\nvalidation:\n  live_prompts: 2\n  max_new_tokens: 8\n  every",
}
"""What makes the recipe that `init` writes small; the rest of it stays as users get it."""


def block_lines(page: Path) -> list[str]:
    """Commands in indented or fenced blocks, without the comment behind them."""
    lines, fenced = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line.strip())
    return [line.split("  ")[0].strip() for line in lines if line.startswith(("helixctl ", "scripts/"))]


def table_lines(page: Path) -> list[str]:
    """Commands in the first column of tables, placeholders filled in."""
    cells = re.findall(r"^\| `(helixctl [^`]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [" ".join(PLACEHOLDERS.get(word, word) for word in cell.split()) for cell in cells]


def spans(page: Path) -> list[str]:
    """Commands in running text."""
    prose = "\n".join(line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("    "))
    found = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))
    return [span for span in found if span.startswith(("helixctl ", "scripts/"))]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    save_target(tmp_path / "path/to/target")
    write_jsonl(tmp_path / "data/train.jsonl", conversations(40))
    for name in ("math", "talk"):
        write_jsonl(tmp_path / f"data/{name}.jsonl", [{"turns": [f"count to {i}", "again"]} for i in range(24)])
    monkeypatch.setenv("HELIXCTL_DOCTOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HELIXCTL_PROMETHEUS_PORT", "0")
    commit_code(tmp_path)
    yield tmp_path


def commit_code(folder: Path) -> None:
    """A repository with a file in `src`, on branch main, for `helixctl doctor`."""
    (folder / "src").mkdir()
    (folder / "src/train.py").write_text("import torch\n", encoding="utf-8")
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q", "-b", "main"], ["add", "src"], [*who, "commit", "-qm", "code"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


def follow(run: Runner, lines: list[str]) -> None:
    """Run commands one after the other; a recipe is made small as soon as it is there."""
    for line in lines:
        done = run(*shlex.split(line, comments=True)[1:])
        assert done.code == 0, f"{line}\n{done.out}\n{done.err}"
        assert "%|" not in done.err and "it/s]" not in done.err, f"a foreign progress bar: {done.err}"
        if line.startswith("helixctl init"):
            shrink(Path("recipe.yaml"))


def shrink(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    for old, new in SMALLER.items():
        assert old in text, f"`init` no longer writes {old!r}"
        text = text.replace(old, new)
    recipe.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize("lines_of", [block_lines, table_lines])
def test_commands_of_a_page_work_in_order(page: Path, lines_of, world: Path, run: Runner) -> None:
    lines = [line for line in lines_of(page) if line.startswith("helixctl ")]
    if not lines:
        return
    if any("lm.yaml" in line for line in lines):
        write_lm_world(world, "lm.yaml")
    follow(run, lines if lines[0].startswith("helixctl init") else [INIT, *lines])


def test_the_main_job_is_told_in_the_readme() -> None:
    commands = [line.split()[1] for line in block_lines(PAGES[0]) if line.startswith("helixctl ")]
    assert commands == ["init", "plan", "prepare", "train", "validate", "export"]
    told = {line.split()[1] for line in table_lines(PAGES[0])}
    assert told == {*commands, "recipe", "doctor", "profile", "convert", "runs", "report", "warmup-compile", "docs"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_exist_can_be_run_and_parse(page: Path) -> None:
    for line in [*block_lines(page), *spans(page)]:
        if not line.startswith("scripts/"):
            continue
        script = ROOT / line.split()[0]
        assert script.is_file(), f"{page.name} names {script.name}"
        if script.suffix == ".py":
            continue
        assert os.access(script, os.X_OK), f"{script} is not executable"
        interpreter = script.read_text(encoding="utf-8").splitlines()[0]
        if "bash" in interpreter:
            subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_running_text_know_their_options(page: Path, run: Runner) -> None:
    for span in spans(page):
        if not span.startswith("helixctl "):
            continue
        words = span.split()[1:]
        command = [word for word in words if re.fullmatch("[a-z][a-z-]*", word)][: 2 if words[0] == "recipe" else 1]
        done = run(*command, "--help")
        assert done.code == 0, f"{page.name} names `{span}`"
        for option in (word.split("=")[0] for word in words if word.startswith("-")):
            assert option in done.out, f"{page.name} names `{span}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_for_torchrun_parse(page: Path, run: Runner) -> None:
    lines = [line.strip() for line in page.read_text(encoding="utf-8").splitlines()]
    for line in (line for line in lines if line.startswith("torchrun ")):
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(shlex.split(line)[1:])
        assert (parsed.module, parsed.training_script, parsed.training_script_args[0]) == (True, "helixctl", "train")
        done = run("train", "--help")
        assert all(word in done.out for word in parsed.training_script_args if word.startswith("--")), line


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name} links to {link}"
