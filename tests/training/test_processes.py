"""Several processes train as one: on loopback, with gloo, in processes that tests start, kill and restart."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from helixctl.checkpoint.store import load_checkpoint
from tests.fork_server import ENVIRONMENT, ROOT, Child, ForkServer, fork_server
from tests.training.hosts import LOOPBACK as ONE_HOST
from tests.training.hosts import Host, can_make_hosts, two_hosts
from tests.training.worlds import make_world, tensors_equal

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
CLOCKED = ("time", "perf/")
FLOAT32 = "train.compute_dtype=float32"
PATIENCE_S = 220
"""For a restart by torchrun, which imports everything twice: 110 s were seen on two busy cores."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as running:
        yield running


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_world(tmp_path, validation=(20, 22, 25, 27))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def settings(folder: Path, name: str, *more: str) -> list[str]:
    values = [
        f"run.dir={folder / name}",
        "train.log_every_steps=1",
        "validation.rows=4",
        "pipeline.threads=1",
        FLOAT32,
        *more,
    ]
    return [part for value in values for part in ("--set", value)]


def start(server: ForkServer, recipe: Path, name: str, size: int, *more: str, resume: bool = False) -> list[Child]:
    """`size` ranks of one run, as torchrun would start them."""
    arguments = ["train", str(recipe), *settings(recipe.parent, name, *more), *(["--resume"] if resume else [])]
    world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": str(free_port()), **LOOPBACK}
    return [
        server.start(arguments, recipe.parent / "logs", world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]


def end(children: list[Child]) -> list[int]:
    return [child.wait() for child in children]


def succeed(children: list[Child]) -> None:
    codes = end(children)
    assert codes == [0] * len(children), "\n".join(child.output for child in children)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(CLOCKED)} for line in lines]


def final(run_dir: Path, step: int = 6) -> dict[str, Any]:
    return load_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}").tensors["drafter"]


def assert_same_run(one: Path, other: Path, step: int = 6) -> None:
    """Parameters and metrics equal within rounding."""
    expected = final(one, step)
    for name, value in final(other, step).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    lines = metrics(one), metrics(other)
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    for line, same in zip(*lines, strict=True):
        assert line == pytest.approx(same, rel=1e-3, abs=1e-5)


def wait_for_step(child: Child, run_dir: Path, step: int) -> None:
    """Until metrics of ``step`` are there."""
    while not child.ended_within(0.02):
        if (run_dir / "metrics.jsonl").exists() and any(line["step"] >= step for line in whole_lines(run_dir)):
            return
    raise AssertionError(f"ended before step {step}: {child.output}")


def whole_lines(run_dir: Path) -> list[dict[str, Any]]:
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.slow
def test_four_micro_batches_of_one_process_are_one_of_each_of_four(server: ForkServer, recipe: Path) -> None:
    folder = recipe.parent
    splits = {"1x4": (1, 1, 4), "4x1": (4, 1, 1), "2x2": (2, 2, 1)}  # processes, drafters of each, accumulation
    for name, (size, drafters, accumulated) in splits.items():
        devices = ", ".join(["cpu"] * drafters)
        more = [f"pipeline.drafters=[{devices}]", f"train.grad_accum_steps={accumulated}"]
        succeed(start(server, recipe, name, size, *more))
    assert_same_run(folder / "1x4", folder / "4x1")
    assert_same_run(folder / "1x4", folder / "2x2")
    results = [json.loads((folder / name / "result.json").read_text()) for name in splits]
    assert results[0]["accounting"] == results[1]["accounting"] == results[2]["accounting"]
    assert results[1]["accounting"]["micro-batches produced"] == 6 * 4 + 2 * 4


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_is_named(server: ForkServer, recipe: Path) -> None:
    children = start(server, recipe, "run", 2, "train.steps=100000")
    wait_for_step(children[0], recipe.parent / "run", 5)
    children[1].send(signal.SIGKILL)
    assert children[0].ended_within(2), children[0].output
    assert end(children) == [1, -signal.SIGKILL]
    assert f"rank 1 (process {children[1].pid} on {socket.gethostname()}) is gone" in " ".join(
        children[0].output.split()
    )


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_others_after_the_stall_timeout(server: ForkServer, recipe: Path) -> None:
    children = start(server, recipe, "run", 2, "train.steps=100000", "pipeline.stall_timeout_s=2")
    wait_for_step(children[0], recipe.parent / "run", 5)
    children[1].send(signal.SIGSTOP)
    assert children[0].ended_within(6), children[0].output
    children[1].send(signal.SIGKILL)
    assert end(children) == [1, -signal.SIGKILL]
    text = " ".join(children[0].output.split())
    assert "drafter-0 has waited" in text or "rank 1" in text, text


@pytest.mark.slow
def test_a_failing_process_tells_the_others_why(server: ForkServer, recipe: Path) -> None:
    succeed(start(server, recipe, "run", 2))
    children = start(server, recipe, "run", 2)
    assert end(children) == [2, 1]
    assert "already holds a run" in children[0].output
    assert "rank 0" in children[1].output and "already holds a run" in " ".join(children[1].output.split())


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step(server: ForkServer, recipe: Path) -> None:
    children = start(server, recipe, "run", 2, "train.steps=100000")
    wait_for_step(children[0], recipe.parent / "run", 5)
    children[1].send(signal.SIGTERM)
    assert end(children) == [143, 143], "\n".join(child.output for child in children)
    assert "--resume" in children[0].output and "Traceback" not in children[0].output + children[1].output
    saved = sorted(path.name for path in (recipe.parent / "run" / "checkpoints").glob("step-*"))
    last = int(saved[-1].removeprefix("step-"))
    assert all(f"at step {last} of 100000" in " ".join(child.output.split()) for child in children)


@pytest.mark.slow
def test_another_number_of_processes_goes_on_at_the_same_document(server: ForkServer, recipe: Path) -> None:
    folder, steps = recipe.parent, "train.steps=20"
    succeed(start(server, recipe, "whole", 1, steps, "train.grad_accum_steps=4"))
    children = start(server, recipe, "moved", 2, steps, "train.grad_accum_steps=2")
    wait_for_step(children[0], folder / "moved", 5)
    for child in children:
        child.send(signal.SIGKILL)
    end(children)
    succeed(start(server, recipe, "moved", 4, steps, "train.grad_accum_steps=1", resume=True))
    assert_same_run(folder / "whole", folder / "moved", 20)
    children = start(server, recipe, "moved", 2, steps, "train.grad_accum_steps=1", resume=True)
    assert end(children) == [1, 1]
    assert all("rows per step" in child.output for child in children)


@pytest.mark.slow
def test_several_drafters_resume_bit_for_bit(server: ForkServer, recipe: Path) -> None:
    folder, more = recipe.parent, ["train.steps=20", "pipeline.drafters=[cpu, cpu]"]
    succeed(start(server, recipe, "whole", 1, *more))
    children = start(server, recipe, "killed", 1, *more)
    wait_for_step(children[0], folder / "killed", 5)
    children[0].send(signal.SIGKILL)
    end(children)
    succeed(start(server, recipe, "killed", 1, *more, resume=True))
    assert tensors_equal(final(folder / "whole", 20), final(folder / "killed", 20))


def torchrun(
    recipe: Path, name: str, *options: str, more: tuple[str, ...] = (), host: Host = ONE_HOST[0]
) -> subprocess.Popen[str]:
    program = ["-m", "helixctl", "train", str(recipe), *settings(recipe.parent, name, *more), "--resume"]
    return subprocess.Popen(
        [*host.words, sys.executable, "-m", "torch.distributed.run", *options, *program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ENVIRONMENT, **LOOPBACK, **host.environment},
    )


@pytest.fixture
def hosts() -> Iterator[tuple[Host, ...]]:
    with two_hosts() if can_make_hosts() else nullcontext(ONE_HOST) as made:
        yield made


def worker_of(agent: subprocess.Popen[str]) -> psutil.Process:
    """The training process that an agent has started last."""
    found = [child for child in psutil.Process(agent.pid).children(recursive=True) if "helixctl" in child.cmdline()]
    return max((child for child in found if "torch.distributed.run" not in child.cmdline()), key=lambda c: c.pid)


@pytest.mark.slow
def test_two_hosts_that_lose_a_rank_start_again_and_take_the_same_steps(
    server: ForkServer, recipe: Path, hosts: tuple[Host, ...]
) -> None:
    folder, steps = recipe.parent, "train.steps=200"
    succeed(start(server, recipe, "whole", 2, steps))
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:{free_port()}", "--rdzv-id=test"]
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", *meeting]
    agents = [
        torchrun(recipe, "hosts", *options, f"--local-addr={host.address}", more=(steps,), host=host) for host in hosts
    ]
    run_dir = folder / "hosts"
    while not (run_dir / "metrics.jsonl").exists() or len(whole_lines(run_dir)) < 5:
        assert all(agent.poll() is None for agent in agents), "\n".join(agent.communicate()[0] for agent in agents)
    worker_of(agents[1]).kill()
    outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert "is gone" in outputs[0] + outputs[1] or "broke" in outputs[0] + outputs[1], "\n".join(outputs)
    assert tensors_equal(final(folder / "whole", 200), final(run_dir, 200))
    assert metrics(folder / "whole") == metrics(run_dir)


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_lost_a_process_where_it_stood(server: ForkServer, recipe: Path) -> None:
    folder, steps = recipe.parent, "train.steps=200"
    succeed(start(server, recipe, "whole", 2, steps))
    agent = torchrun(recipe, "lost", "--standalone", "--nproc-per-node=2", "--max-restarts=1", more=(steps,))
    run_dir = folder / "lost"
    while not (run_dir / "metrics.jsonl").exists() or len(whole_lines(run_dir)) < 5:
        assert agent.poll() is None, agent.communicate()[0]
    os.kill(int((run_dir / "run.pid").read_text()), signal.SIGKILL)
    output, _ = agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 0, output
    assert tensors_equal(final(folder / "whole", 200), final(run_dir, 200))
    assert metrics(folder / "whole") == metrics(run_dir)
