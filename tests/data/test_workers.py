"""prepare with processes: the same store, and nothing left behind, whatever ends them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helixctl.data.prepare import prepare
from helixctl.data.store import Store
from helixctl.recipe.schema import Recipe
from tests.data import templates

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

# A prepare whose source never ends. Prints the ids of its processes once they have worked.
ENDLESS = """
import multiprocessing
import sys
from helixctl.data import prepare as module
from helixctl.errors import DataError
from helixctl.recipe.schema import Recipe

told = []

def endless(pieces):
    batch = next(original(pieces))
    while True:
        yield batch

def tell(read, total, kept):
    if not told:
        told.append(True)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)

if __name__ == "__main__":
    original, module._batches = module._batches, endless
    try:
        module.prepare(Recipe.model_validate_json(sys.argv[1]), on_progress=tell)
    except DataError as error:
        sys.exit(error.message)
"""


def recipe_json(folder: Path, num_rows: int, workers: int, store: str = "store") -> str:
    templates.byte_tokenizer().save_pretrained(folder / "target")
    with (folder / "train.jsonl").open("w") as file:
        for i in range(num_rows):
            messages = [{"role": role, "content": f"{role} says {i}"} for role in ("user", "assistant")]
            file.write(json.dumps({"messages": messages}) + "\n")
    data = {"train": [{"path": str(folder / "train.jsonl")}], "store": str(folder / store), "workers": workers}
    target = {"model": str(folder / "target")}
    return json.dumps({"run": {"dir": str(folder)}, "target": target, "data": data, "drafter": None})


def start_endless(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A prepare that works until it is ended, in a process group of its own; handles of its worker processes."""
    old = Recipe.model_validate_json(recipe_json(folder, 3, workers=0))
    prepare(old)
    (folder / "endless.py").write_text(ENDLESS)
    process = subprocess.Popen(
        [sys.executable, str(folder / "endless.py"), recipe_json(folder, 300, workers=2)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    return process, [os.pidfd_open(pid) for pid in pids]


@pytest.fixture
def endless_prepare(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """See ``start_endless``; over with the test, whatever the test found."""
    process, workers = start_endless(tmp_path)
    yield process, workers
    process.kill()  # the workers die with it
    process.wait()


def wait_until_ended(handles: list[int]) -> None:
    """Returns when every process has ended; fails after a minute."""
    for handle in handles:
        assert select.select([handle], [], [], 60)[0], "a worker outlived its prepare"
        os.close(handle)


def test_processes_make_the_same_store_as_none(tmp_path: Path) -> None:
    results = [
        prepare(Recipe.model_validate_json(recipe_json(tmp_path, 700, workers, f"store{workers}")))
        for workers in (0, 2)
    ]
    assert results[0].store.fingerprint == results[1].store.fingerprint
    assert results[1].kept == 700


@pytest.mark.parametrize("everybody", [True, False])
def test_an_interrupt_ends_all_processes_and_leaves_the_old_store(
    tmp_path: Path, endless_prepare: tuple[subprocess.Popen[str], list[int]], everybody: bool
) -> None:
    """A terminal sends Ctrl-C to the whole group, other programs to the parent alone."""
    process, workers = endless_prepare
    (os.killpg if everybody else os.kill)(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT or process.returncode == 130
    assert errors.count("KeyboardInterrupt") == 1, errors  # no tracebacks from the workers
    assert len(workers) == 2
    wait_until_ended(workers)
    assert Store.open(tmp_path / "store").split("train").num_documents == 3
    assert not (tmp_path / ".store.tmp").exists()


def test_a_killed_parent_takes_its_workers_along(
    tmp_path: Path, endless_prepare: tuple[subprocess.Popen[str], list[int]]
) -> None:
    process, workers = endless_prepare
    process.kill()
    process.communicate(timeout=60)
    wait_until_ended(workers)
    assert Store.open(tmp_path / "store").split("train").num_documents == 3
    prepare(Recipe.model_validate_json(recipe_json(tmp_path, 5, workers=0)))
    assert not (tmp_path / ".store.tmp").exists()
