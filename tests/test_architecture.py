"""Rules about the source itself: what may be imported, named, printed, and how long things may get.

Ruff, mypy and import-linter hold the rest (pyproject.toml). Here is what they cannot see: imports that come in through
another module, the names of plug-ins, lengths in lines.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from helixctl.plugins import DRAFTERS, plugin_names

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "helixctl"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50

HEAVY = {"torch", "transformers"}
SLOW_TO_IMPORT = HEAVY | {"numpy", "safetensors", "tokenizers", "tensorboard", "gguf", "accelerate"}
# Modules that must load without torch. The command line itself is held to SLOW_TO_IMPORT.
LIGHT = (
    "errors.py",
    "plugins.py",
    "plan.py",
    "lm_plan.py",
    "cgroups.py",
    "devices.py",
    "machine.py",
    "memory.py",
    "recipe/*.py",
    "data/store*.py",
    "data/packing.py",
    "data/anchors.py",
    "data/sequence.py",
    "data/window*.py",
    "data/formats/*.py",
    "models/facts.py",
    "profiling/*.py",
    "engine/status.py",
    "models/drafters/*/options.py",
    "doctor/[!l]*.py",
    "doctor/listing.py",
    "doctor/formats/*.py",
    "doctor/rules/*.py",
)

# ------------------------------------------------------------------------------------------------------------- imports


def test_command_line_loads_nothing_heavy() -> None:
    done = python("-c", f"{loaded_after('helixctl.cli.app')}print(*sorted({SLOW_TO_IMPORT!r} & loaded))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_light_modules_load_without_torch() -> None:
    paths = sorted(path for pattern in LIGHT for path in PACKAGE.glob(pattern))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    done = python("-c", f"{loaded_after(*names)}print(*sorted({HEAVY!r} & loaded))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_help_answers_without_torch() -> None:
    done = python("-X", "importtime", "-m", "helixctl", "--help")
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
    assert not imported(done.stderr) & SLOW_TO_IMPORT


def test_recipe_error_answers_without_torch(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("kind: drafter\nrnu: {dir: runs/x}\n", encoding="utf-8")
    done = python("-X", "importtime", "-m", "helixctl", "plan", str(recipe))
    assert done.returncode == 2, done.stderr[-2000:]
    assert "rnu" in done.stderr
    assert not imported(done.stderr) & SLOW_TO_IMPORT


def test_doctor_looks_at_code_without_torch(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("import torch\nfrom torch.utils.data import DataLoader\nDataLoader([], num_workers=2)\n")
    done = python("-X", "importtime", "-m", "helixctl", "doctor", str(source), "--no-cache")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "HX010" in done.stdout
    assert not imported(done.stderr) & SLOW_TO_IMPORT


# -------------------------------------------------------------------------------------------------------------- source


def test_init_files_are_a_docstring_only() -> None:
    bad = [name for name, _, tree in sources() if name.endswith("__init__.py") and not is_docstring_only(tree)]
    assert_none(bad)


def test_every_module_has_a_docstring() -> None:
    written = [(name, tree) for name, _, tree in sources() if not name.startswith("tests/")]
    assert_none([name for name, tree in written if not ast.get_docstring(tree)])


@pytest.mark.parametrize("algorithm", plugin_names(DRAFTERS))
def test_algorithm_is_named_in_its_own_folder_only(algorithm: str) -> None:
    """A new algorithm is one folder and no other edit, so no other module may know one by name."""
    bad = [
        f"{name}:{number}"
        for name, text, _ in sources()
        if name.startswith("helixctl/") and not name.startswith("helixctl/models/drafters/")
        for number, line in enumerate(text.splitlines(), 1)
        if algorithm.lower() in line.lower()
    ]
    assert_none(bad)


def test_files_are_short() -> None:
    lengths = {name: len(text.splitlines()) for name, text, _ in sources()}
    assert_none([f"{name}: {n} lines" for name, n in lengths.items() if n > MAX_FILE_LINES])


def test_functions_are_short() -> None:
    lengths = {
        f"{name}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for name, _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert_none([f"{name}: {n} lines" for name, n in lengths.items() if n > MAX_FUNCTION_LINES])


def test_threads_are_made_in_the_engine_only() -> None:
    """Elsewhere a thread would escape the supervisor: no cancellation, no first failure, no name."""
    makers = ("threading.Thread", "threading.Timer", "concurrent.futures.ThreadPoolExecutor", "ThreadPoolExecutor")
    assert_none([name for name in package_calls(makers) if not name.startswith("helixctl/engine/")])


def test_nothing_sleeps() -> None:
    """Whoever waits, waits on something that can be cancelled."""
    assert_none(list(package_calls(("time.sleep", "sleep"))))


def test_every_silenced_rule_says_why() -> None:
    no_reason = re.compile(r"#\s*noqa(?!: [A-Z]+\d+(, ?[A-Z]+\d+)*\W+[A-Za-z])")
    bad = [
        f"{name}:{number}"
        for name, text, _ in sources()
        if name != "tests/test_architecture.py"
        for number, line in enumerate(text.splitlines(), 1)
        if no_reason.search(line)
    ]
    assert_none(bad)


# ------------------------------------------------------------------------------------------------------------- helpers


def assert_none(offenders: list[str]) -> None:
    """Fail with the whole list: whoever broke a rule fixes all places at once."""
    assert not offenders, "\n" + "\n".join(offenders)


@cache
def sources() -> tuple[tuple[str, str, ast.Module], ...]:
    """Path in the checkout, text and syntax tree of every Python file of the package, the tests and the scripts."""
    folders = (PACKAGE, ROOT / "tests", ROOT / "scripts")
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    texts = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    return tuple((name, text, ast.parse(text, name)) for name, text in texts)


def package_calls(functions: tuple[str, ...]) -> Iterator[str]:
    """Where the package calls one of ``functions``, written as in the source: `file:line`."""
    for name, _, tree in sources():
        if name.startswith("helixctl/"):
            calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
            yield from (f"{name}:{call.lineno}" for call in calls if ast.unparse(call.func) in functions)


def is_docstring_only(tree: ast.Module) -> bool:
    return len(tree.body) == 1 and ast.get_docstring(tree) is not None


def loaded_after(*modules: str) -> str:
    """Program text that imports ``modules`` and leaves the top-level names now loaded in `loaded`."""
    lines = [
        "import sys",
        *(f"import {module}" for module in modules),
        'loaded = {m.split(".")[0] for m in sys.modules}',
    ]
    return "\n".join(lines) + "\n"


def imported(importtime: str) -> set[str]:
    """Top-level names in the output of `python -X importtime`."""
    lines = (line for line in importtime.splitlines() if line.startswith("import time:"))
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
