"""`helixctl doctor [PATHS]` through the command line: choosing rules, reports, suppressions, baselines, fixes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from helixctl.doctor.baseline import write_baseline
from helixctl.doctor.finding import Edit, Finding
from helixctl.doctor.fixes import apply_edits
from helixctl.doctor.listing import format_names, format_report, make_report
from tests.cli.runner import Runner
from tests.conftest import ROOT

ERROR = "import torch\nimport multiprocessing as mp\nctx = mp.get_context('fork')\n"
WARNING = "import queue\nq = queue.Queue()\n"
ZERO = """from torch.utils.data import DataLoader
d = DataLoader(
    [],
    multiprocessing_context='spawn',
    batch_size=2,
)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HELIXCTL_DOCTOR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text(ERROR)
    (tmp_path / "src/feed.py").write_text(WARNING)
    return tmp_path


def configure(project: Path, text: str) -> None:
    (project / "pyproject.toml").write_text(f"[tool.helixctl.doctor]\n{text}\n")


def codes(run: Runner, *words: str) -> list[str]:
    return sorted(finding["code"] for finding in json.loads(run("doctor", "--format", "json", *words).out)["findings"])


# ------------------------------------------------------------------------------------------------------ exit codes


def test_exit_codes(project: Path, run: Runner) -> None:
    assert run("doctor").code == 1
    assert run("doctor", "src/feed.py").code == 0
    assert run("doctor", "src/feed.py", "--fail-on", "warning").code == 1
    assert run("doctor", "--fail-on", "never").code == 0
    (project / "empty").mkdir()
    assert run("doctor", "empty").code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py", "also-not"], "there is no nowhere.py, no also-not"),
        (["--select", "HX9999"], "HX9999"),
        (["--ignore", "dataloader-start-metod"], "dataloader-start-method"),
        (["--format", "jsn"], "json"),
        (["--fail-on", "errors"], "error"),
        (["--show", "loud"], "loud"),
        (["--baseline", "none.json"], "none.json"),
        (["--config", "none.toml"], "none.toml"),
        (["--explain", "HX999"], "HX999"),
        (["--diff-base", "main"], "git"),
    ],
)
def test_wrong_use_is_2_and_says_what(project: Path, run: Runner, words: list[str], told: str) -> None:
    done = run("doctor", *words)
    assert done.code == 2
    assert told in done.err


def test_mistakes_in_the_configuration_are_named_at_once(project: Path, run: Runner) -> None:
    configure(project, 'selct = ["ALL"]\nfail-on = "often"\nignore = "HX010"\ntarget-python = "new"')
    done = run("doctor")
    assert done.code == 2
    for told in ("selct: unknown key; did you mean 'select'?", "fail-on", "ignore: must be a list", "target-python"):
        assert told in done.err


# ------------------------------------------------------------------------------------------------------ choosing


def test_rules_are_chosen_by_code_prefix_and_name(project: Path, run: Runner) -> None:
    assert codes(run) == ["HX002", "HX033"]
    assert codes(run, "--select", "HX0") == ["HX002", "HX033"]
    assert codes(run, "--select", "unbounded-queue") == ["HX033"]
    assert codes(run, "--ignore", "HX033,explicit-fork") == []
    assert codes(run, "--select", "HX001", "--extend-select", "HX033") == ["HX033"]
    assert codes(run, "--ignore", "HX0", "--extend-select", "HX002") == ["HX002"]


def test_configuration(project: Path, run: Runner) -> None:
    configure(project, 'ignore = ["HX033"]\nfail-on = "never"')
    assert codes(run) == ["HX002"]
    assert run("doctor").code == 0
    assert codes(run, "--select", "HX033") == ["HX033"], "what is asked for by name is not ignored"
    configure(project, '[tool.helixctl.doctor.per-file-ignores]\n"src/train.py" = ["HX002"]\n"feed.py" = ["ALL"]')
    assert codes(run) == []
    configure(project, 'exclude = ["src"]')
    assert codes(run) == []
    assert codes(run, "src/train.py") == ["HX002"], "a file named outright is looked at"


def test_project_tokenizer(project: Path, run: Runner) -> None:
    (project / "src/tok.py").write_text("from transformers import AutoTokenizer as A\nt = A.from_pretrained('gpt2')\n")
    assert "HX101" not in codes(run)
    configure(project, 'project-tokenizer = "helix_lm.tokenizer.HelixTokenizer"')
    assert "HX101" in codes(run)


def test_info_is_shown_on_demand(project: Path, run: Runner) -> None:
    (project / "src/t.py").write_text("import threading\nthreading.Thread(target=print).start()\n")
    assert "HX032" not in codes(run)
    assert "HX032" in codes(run, "--show", "info")
    assert "HX032" in codes(run, "--select", "HX032")
    assert run("doctor", "src/t.py", "--fail-on", "info").code == 1


# ------------------------------------------------------------------------------------------------------ suppressions


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("q = queue.Queue()  # helixctl: ignore[HX033] one item at most", []),
        ("q = queue.Queue()  # helixctl: ignore[unbounded-queue, HX034] one item at most", ["HX900"]),
        ("q = queue.Queue(\n)  # helixctl: ignore[HX033] one item at most", []),
        ("# helixctl: ignore[HX033] one item at most\n\n# and more\nq = queue.Queue()", []),
        ("# helixctl: ignore-file[HX033] a test double\nq = queue.Queue()\nr = queue.Queue()", []),
        ("q = queue.Queue()  # helixctl: ignore[HX033]", ["HX903"]),
        ("q = queue.Queue()  # helixctl: ignore", ["HX033", "HX901"]),
        ("q = queue.Queue()  # helixctl: ignore[HX03] prefix", ["HX033", "HX901"]),
        ("q = queue.Queue(2)  # helixctl: ignore[HX033] old", ["HX900"]),
    ],
)
def test_suppressions(project: Path, run: Runner, line: str, left: list[str]) -> None:
    (project / "src/feed.py").write_text(f"import queue\n{line}\n")
    assert codes(run, "src/feed.py") == left


def test_a_suppression_of_a_rule_that_did_not_run_is_not_stale(project: Path, run: Runner) -> None:
    (project / "src/feed.py").write_text("x = 1  # helixctl: ignore[HX033] old\n")
    assert codes(run, "src/feed.py", "--ignore", "HX033") == []
    assert codes(run, "src/feed.py") == ["HX900"]


# ------------------------------------------------------------------------------------------------------ baseline, diff


def test_baseline_hides_what_is_known_and_shows_what_is_new(project: Path, run: Runner) -> None:
    assert run("doctor", "--baseline", "known.json", "--write-baseline").code == 0
    assert run("doctor", "--baseline", "known.json").code == 0
    (project / "src/train.py").write_text("# moved\n\n" + ERROR + "other = mp.get_context('fork')\n")
    assert codes(run, "--baseline", "known.json") == ["HX002"]
    (project / "src/train.py").write_text(ERROR.replace("ctx = ", "ctx = ") * 2)
    assert codes(run, "--baseline", "known.json") == ["HX002"], "the same line twice counts twice"
    configure(project, 'baseline = "known.json"')
    assert run("doctor").code == 1
    (project / "known.json").write_text('{"version": 7, "findings": []}')
    assert run("doctor").code == 2


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_diff_base_shows_what_is_new_since_a_revision(project: Path, run: Runner) -> None:
    git(project, "init", "-q", "-b", "main")
    (project / ".gitignore").write_text("cache/\n")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "old sins")
    assert codes(run, "--diff-base", "main") == []
    (project / "src/train.py").write_text("# a comment\n" + ERROR)
    assert codes(run, "--diff-base", "main") == [], "an old finding that moved is not new"
    (project / "src/new.py").write_text(WARNING)
    git(project, "mv", "src/feed.py", "src/moved.py")
    assert codes(run, "--diff-base", "HEAD") == ["HX033"], "untracked files count, renamed ones do not"
    (project / "src/train.py").write_text(ERROR + "import os\ndef go():\n    torch.cuda.init()\n    os.fork()\n")
    assert "HX001" in codes(run, "--diff-base", "HEAD")
    done = run("doctor", "--diff-base", "nowhere")
    assert done.code == 2 and "nowhere" in done.err


# ------------------------------------------------------------------------------------------------------ fixes


def test_fix_mends_only_what_is_safe(project: Path, run: Runner) -> None:
    path = project / "src/zero.py"
    path.write_bytes(ZERO.replace("\n", "\r\n").encode())
    (project / "src/old.py").write_text("x = 1  # helixctl: ignore[HX033] old\ny = 2\n")
    done = run("doctor", "--fix")
    assert done.code == 1, "the fork stays"
    assert b"multiprocessing_context" not in path.read_bytes() and b"batch_size=2" in path.read_bytes()
    assert b"\r\n" in path.read_bytes()
    assert (project / "src/old.py").read_text() == "x = 1\ny = 2\n"
    assert (project / "src/train.py").read_text() == ERROR
    assert codes(run, "src/zero.py", "src/old.py") == []


def test_edits_are_applied_from_the_back_and_never_overlap() -> None:
    text = "äb, c\nd"
    assert apply_edits(text, [Edit(1, 2, 1, 3, "X"), Edit(1, 5, 2, 2, "Y")]) == "äX, Y"
    assert apply_edits(text, [Edit(1, 1, 1, 4, ""), Edit(1, 2, 1, 3, "X")]) in ("äX, c\nd", " c\nd")


# ------------------------------------------------------------------------------------------------------ formats


def test_formats(project: Path, run: Runner) -> None:
    assert set(format_names()) == {"text", "json", "github", "gitlab", "sarif", "junit"}
    text = run("doctor").out
    assert "src/train.py:3:7: error HX002" in text and "1 error, 1 warning in 2 files" in text
    assert "::error title=HX002 explicit-fork,file=src/train.py,line=3,col=7" in run("doctor", "--format", "github").out
    gitlab = json.loads(run("doctor", "--format", "gitlab").out)
    assert {entry["severity"] for entry in gitlab} == {"major", "minor"}
    assert all(entry["location"]["positions"]["begin"]["line"] for entry in gitlab)
    sarif = json.loads(run("doctor", "--format", "sarif").out)
    result = next(r for r in sarif["runs"][0]["results"] if r["ruleId"] == "HX002")
    region = result["locations"][0]["physicalLocation"]["region"]
    assert (sarif["version"], result["level"], region["startLine"]) == ("2.1.0", "error", 3)
    assert sarif["runs"][0]["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "HX002"
    junit = ElementTree.fromstring(run("doctor", "--format", "junit").out)
    assert junit.get("failures") == "2" and len(junit.findall(".//failure")) == 2


@pytest.mark.parametrize("name", format_names())
def test_every_format_says_nothing_found(name: str) -> None:
    text = format_report(make_report([], 3, "warning", 0, "1"), name)
    assert text.endswith("\n")
    if name in ("json", "gitlab", "sarif"):
        json.loads(text)
    if name == "junit":
        assert ElementTree.fromstring(text).get("failures") == "0"


def test_github_shows_ten_of_a_level_and_counts_the_rest() -> None:
    many = [Finding("HX002", "n", "error", "a,b.py", n, 1, n, 2, "50 %\nmore") for n in range(1, 15)]
    text = format_report(make_report(many, 1, "warning", 0, "1"), "github")
    assert text.count("::error title=HX002") == 10
    assert "and 4 more" in text and "file=a%2Cb.py" in text and "50 %25%0Amore" in text


def test_gitlab_fingerprints_are_unique() -> None:
    twice = [Finding("HX002", "n", "error", "a.py", n, 1, n, 2, "m", text="same") for n in (1, 2)]
    entries = json.loads(format_report(make_report(twice, 1, "warning", 0, "1"), "gitlab"))
    assert len({entry["fingerprint"] for entry in entries}) == 2


def test_output_file_and_environment(project: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIXCTL_DOCTOR_FORMAT", "json")
    done = run("doctor", "--output-file", "out/report.json")
    assert done.code == 1 and "1 error" in done.out
    assert json.loads(Path("out/report.json").read_text())["counts"] == {"error": 1, "warning": 1, "info": 0}


# ---------------------------------------------------------------------------------------------- rules, notebooks


def test_rules_explain_themselves(run: Runner) -> None:
    listed = run("doctor", "--list-rules").out
    assert "HX010  dataloader-start-method" in listed
    explained = run("doctor", "--explain", "dataloader-start-method").out
    for part in ("HX010: ", "What it checks", "Why it matters", "Fix", "Level: warning"):
        assert part in explained
    assert {rule["code"] for rule in json.loads(run("doctor", "--list-rules", "--format", "json").out)} >= {"HX001"}


def test_notebook_findings_name_the_cell_and_its_line(project: Path, run: Runner) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# title"]},
        {"cell_type": "code", "source": ["%pip install torch\n", "!ls\n", "import queue\n", "files = !ls\n"]},
        {"cell_type": "code", "source": "%%bash\nfor f in *; do echo $f; done"},
        {"cell_type": "code", "source": "x = 1\nqueue.Queue?\nq = queue.Queue()\nawait q\n"},
    ]
    (project / "n.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    (finding,) = json.loads(run("doctor", "n.ipynb", "--format", "json").out)["findings"]
    assert (finding["code"], finding["cell"], finding["line"], finding["column"]) == ("HX033", 4, 3, 5)
    assert "n.ipynb:cell 4:3:5" in run("doctor", "n.ipynb").out
    (project / "n.ipynb").write_text("{}")
    assert codes(run, "n.ipynb") == ["HX902"]


def test_files_that_cannot_be_read_are_findings(project: Path, run: Runner) -> None:
    (project / "bad.py").write_text("def f(:\n")
    (project / "bytes.py").write_bytes(b"x = '\xff'\n")
    (project / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xff'\n")
    assert codes(run, "bad.py", "bytes.py", "latin.py") == ["HX902", "HX902"]
    assert run("doctor", "bad.py").code == 1


def test_columns_count_characters(project: Path, run: Runner) -> None:
    (project / "wide.py").write_text("import queue\nwör = 'äöü'; q = queue.Queue()\n")
    (finding,) = json.loads(run("doctor", "wide.py", "--format", "json").out)["findings"]
    assert finding["column"] == len("wör = 'äöü'; q = ") + 1


def test_cache_gives_the_same_and_notices_changes(project: Path, run: Runner) -> None:
    first = codes(run)
    assert list((project / "cache").glob("*.json"))
    assert codes(run) == first
    (project / "src/feed.py").write_text("x = 1\n")
    assert codes(run) == ["HX002"]
    for path in (project / "cache").glob("*.json"):
        path.write_text("torn")
    assert codes(run) == ["HX002"]
    assert codes(run, "--no-cache") == ["HX002"]


def test_many_files_are_shared_between_processes(project: Path, run: Runner) -> None:
    for number in range(210):
        (project / f"src/m{number:03}.py").write_text(WARNING if number % 70 == 0 else "x = 1\n")
    assert codes(run, "--jobs", "2", "--no-cache") == ["HX002", *["HX033"] * 4]


def test_baseline_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep/known.json"
    finding = Finding("HX002", "n", "error", "a.py", 1, 1, 1, 2, "m", text="t")
    assert write_baseline(path, [finding, finding]) == 2
    assert json.loads(path.read_text())["findings"] == [{"path": "a.py", "code": "HX002", "text": "t", "count": 2}]


def test_pre_commit_hook_calls_the_command(run: Runner) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["entry"]) == ("helixctl-doctor", "helixctl doctor")
    assert run(*hook["entry"].split()[1:], "--help").code == 0


def test_our_own_code_is_clean(monkeypatch: pytest.MonkeyPatch, run: Runner, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    done = run("doctor", "helixctl", "scripts", "--cache-dir", tmp_path)
    assert done.code == 0, done.out
