"""Two processes train one causal LM: the steps of one process with as many rows, within rounding."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.checkpoint.store import load_checkpoint
from tests.fork_server import ForkServer, fork_server
from tests.lm_worlds import make_lm_world

CLOCKED = ("time", "perf/")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as running:
        yield running


def train(server: ForkServer, recipe: Path, name: str, size: int, *overrides: str) -> None:
    """`size` ranks of one run, as torchrun would start them."""
    values = [f"run.dir={recipe.parent / name}", "train.compute_dtype=float32", *overrides]
    words = ["train", str(recipe), *(part for value in values for part in ("--set", value))]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": port}
    world |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    children = [
        server.start(words, recipe.parent / "logs", world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    codes = [child.wait() for child in children]
    assert codes == [0] * size, "\n".join(child.output for child in children)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(CLOCKED)} for line in lines]


def test_two_processes_take_the_steps_of_one(server: ForkServer, tmp_path: Path) -> None:
    recipe = make_lm_world(tmp_path)
    common = ["stages.1.optimizer=fresh", "validation.rows=4"]
    train(server, recipe, "one", 1, "train.grad_accum_steps=2", *common)
    train(server, recipe, "two", 2, *common)
    one, two = (load_checkpoint(tmp_path / name / "checkpoints/step-00000008").tensors for name in ("one", "two"))
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, rtol=1e-4, atol=1e-5)
    for line, same in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert line == pytest.approx(same, rel=1e-3, abs=1e-5)
