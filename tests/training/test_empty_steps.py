"""A step in which every document is bad is skipped and counted, alike by all drafters of all processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.checkpoint.store import load_checkpoint
from tests.fork_server import ForkServer, fork_server
from tests.reliability.faults import FAULT
from tests.training.test_processes import LOOPBACK, free_port
from tests.training.worlds import make_world, tensors_equal

pytestmark = pytest.mark.slow
EMPTY_STEP = 3
SETTINGS = (
    "data.packing=false",
    "validation.every_steps=0",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=10",
    "train.log_every_steps=1",
    "train.steps=5",
    "train.weight_decay=0.1",
    "train.max_bad_fraction=0.5",
    "train.compute_dtype=float32",
    "pipeline.threads=1",
)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as running:
        yield running


def train(server: ForkServer, recipe: Path, name: str, calls: tuple[str, ...], *more: str) -> None:
    """A run with a rank for each of ``calls``, which says the numbers of the micro-batches that its target spoils."""
    ranks = len(calls)
    values = [f"run.dir={recipe.parent / name}", *SETTINGS, *more]
    words = ["train", str(recipe), *(word for value in values for word in ("--set", value))]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(free_port()), **LOOPBACK}
    children = []
    for rank, numbers in enumerate(calls):
        fault = f"target/NaN in all documents/{numbers or 0}/{recipe.parent / 'instant'}"
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), FAULT: fault}
        children.append(server.start(words, recipe.parent / "logs", world | own))
    assert [child.wait() for child in children] == [0] * ranks, "\n".join(child.output for child in children)


def tensors(recipe: Path, name: str, step: int) -> dict[str, Any]:
    saved = load_checkpoint(recipe.parent / name / "checkpoints" / f"step-{step:08d}").tensors
    return {**saved["drafter"], **saved["optimizer"]}


def test_no_drafter_moves_where_every_document_of_a_step_is_bad(server: ForkServer, tmp_path: Path) -> None:
    recipe = make_world(tmp_path, train=(20,) * 12)
    train(server, recipe, "accumulated", ("5+6",), "train.grad_accum_steps=2")
    train(server, recipe, "drafters", ("5+6",), "pipeline.drafters=[cpu, cpu]")
    train(server, recipe, "ranks", ("3", "3"))
    for name in ("accumulated", "drafters", "ranks"):
        assert tensors_equal(*(tensors(recipe, name, step) for step in (EMPTY_STEP - 1, EMPTY_STEP)))
        assert not tensors_equal(*(tensors(recipe, name, step) for step in (EMPTY_STEP, EMPTY_STEP + 1)))
        books = json.loads((tmp_path / name / "result.json").read_text())["accounting"]
        assert (books["steps skipped"], books["documents left out"], books["micro-batches trained"]) == (1, 2, 10)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["train/empty_steps"] for line in lines] == [0, 0, 1, 0, 0]
        assert not any(line["train/bad_steps"] for line in lines)
    expected = tensors(recipe, "accumulated", 5)
    for name in ("drafters", "ranks"):  # had one drafter taken the step and another not, they would differ from here on
        for key, value in tensors(recipe, name, 5).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


def test_a_step_is_taken_where_one_drafter_alone_has_nothing_to_learn_from(server: ForkServer, tmp_path: Path) -> None:
    recipe = make_world(tmp_path, train=(20,) * 12)
    train(server, recipe, "accumulated", ("5",), "train.grad_accum_steps=2")
    train(server, recipe, "drafters", ("5",), "pipeline.drafters=[cpu, cpu]")
    train(server, recipe, "ranks", ("3", ""))
    expected = tensors(recipe, "accumulated", 5)
    for name in ("drafters", "ranks"):
        for key, value in tensors(recipe, name, 5).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
        books = json.loads((tmp_path / name / "result.json").read_text())["accounting"]
        assert (books["steps skipped"], books["documents left out"]) == (0, 1)
