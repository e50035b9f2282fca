"""Topologies: which cases, what is predicted of them, and the real pipeline with 6 + 2 loops on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helixctl.data.sequence import Sequence
from helixctl.data.store import Store
from helixctl.training.build import Targets, build_drafter, make_loader, make_slot_for
from helixctl.training.loop import Drafter
from helixctl.training.placement import Pace
from helixctl.training.stages import fill_slot
from scripts.benchmark_shape import consumed
from scripts.shapes import random_weights
from scripts.topologies import (
    WORKLOADS,
    Case,
    compare_processes,
    cpu_cases,
    eight,
    gpu_cases,
    main,
    parse_options,
    predict,
    take_wave,
)
from scripts.topology_case import make_case_plan, products
from scripts.topology_case import parse_options as parse_case
from tests.fork_server import Child, ForkServer, fork_server
from tests.training.test_processes import LOOPBACK, free_port

SIX, TWO = ",".join(["cpu"] * 6), "cpu,cpu"
CASE = ("--shape", "tiny", "--steps", "3", "--set", "pipeline.threads=1", "--set", "train.compute_dtype=float32")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as running:
        yield running


def test_both_shapes_and_the_packed_documents_in_every_topology() -> None:
    cases = gpu_cases(8)
    assert {*eight("8b"), *eight("27b"), *eight("8b-packed", small=False)} <= set(cases)
    assert all(case.gpus <= 8 for case in cases) and len(cases) == len(set(cases))
    assert {case.kind for case in cases} == {"alone", "pipeline", "target", "drafter"}
    assert all(case.workload in WORKLOADS for case in (*cases, *cpu_cases(sleeping=False)))


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_every_wave_gives_each_gpu_to_one_case(num_gpus: int) -> None:
    gpus = [str(i) for i in range(num_gpus)]
    waiting = [case for case in gpu_cases(num_gpus) if case.gpus <= num_gpus]
    left, seen = list(waiting), list[Case]()
    while left:
        wave = take_wave(left, gpus)
        used = [gpu for _, own in wave for gpu in own]
        assert len(used) == len(set(used)) <= num_gpus
        assert all(len(own) == case.gpus for case, own in wave)
        seen += [case for case, _ in wave]
    assert sorted(map(str, seen)) == sorted(map(str, waiting))
    assert any("together" in case.name for case in waiting)


def test_devices_are_the_processes_own() -> None:
    assert Case("8b", 2, 1).devices(cpu=False) == (["cuda:0", "cuda:1"], ["cuda:2"])
    assert Case("8b", 2, 2, together=True).devices(cpu=False) == (["cuda:0", "cuda:1"],) * 2
    assert Case("8b", 3, 1, processes=2).gpus == 8 and Case("8b", kind="alone").gpus == 1


def test_predictions_follow_from_the_slower_side() -> None:
    on_gpus, sleeping = parse_options([]), parse_options(["--cpu", "--stage-ms", "30", "10"])
    for options, pace in ((on_gpus, Pace(0.03, 0.01, 100.0)), (sleeping, Pace(9.0, 9.0, 100.0))):
        for case, rate in ((Case("8b", 6, 2), 200.0), (Case("8b", 1, 7), 33.3), (Case("8b", 3, 1, 2), 200.0)):
            found = predict(case, pace, 0, options)
            assert found["arithmetic tokens/s"] == pytest.approx(100 * rate, rel=0.01)
            assert found["simulated tokens/s"] == pytest.approx(100 * rate, rel=0.1)
    on_cpu = predict(Case("tiny", 6, 2), Pace(0.03, 0.01, 100.0), 0, parse_options(["--cpu"]))
    assert on_cpu == {"arithmetic tokens/s": pytest.approx(100 / 0.04)}


def test_products_are_those_that_torch_counts(tmp_path: Path) -> None:
    options = parse_case([*CASE, "--targets", "cpu", "--drafters", "cpu"])
    with random_weights():
        plan = make_case_plan(tmp_path, options)
        targets, store = Targets(plan), Store.open(plan.recipe.data.store)
        target, shared = targets.on("cpu"), targets.shared_on("cpu")
        model, slot = build_drafter(plan, torch.device("cpu")), make_slot_for(plan, torch.device("cpu"))
    batch = make_loader(plan, store, Sequence(1, 1)).batch(0)
    counter = FlopCounterMode(display=False)
    with counter:
        fill_slot(slot, batch, target.features(batch))
        cast(Drafter, model).loss(slot, shared).numerator.backward()
    kinds = counter.get_flop_counts()["Global"]
    counted = sum(count for kind, count in kinds.items() if str(kind).split(".")[-1] in ("mm", "addmm"))
    assert products(plan, consumed(plan, store, 0, 1)) == pytest.approx(counted, rel=0.05)


def start(server: ForkServer, folder: Path, words: tuple[str, ...], size: int = 1) -> list[Child]:
    world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": str(free_port()), **LOOPBACK}
    return [
        server.start([*CASE, *words], folder, world | {"RANK": str(i), "LOCAL_RANK": str(i)}, "scripts.topology_case")
        for i in range(size)
    ]


def found_by(children: list[Child]) -> dict[str, Any]:
    codes = [child.wait() for child in children]
    assert codes == [0] * len(children), "\n".join(child.output for child in children)
    lines = [line for child in children for line in child.output.splitlines() if line.startswith("{")]
    assert len(lines) == 1
    return dict(json.loads(lines[0]))


def test_two_drafters_in_one_process_learn_what_one_in_each_of_two_learns(server: ForkServer, tmp_path: Path) -> None:
    one = found_by(start(server, tmp_path, ("--targets", SIX, "--drafters", TWO)))
    several = found_by(start(server, tmp_path, ("--targets", "cpu,cpu,cpu", "--drafters", "cpu"), size=2))
    assert len(one["losses"]) == 6 and len(set(one["losses"])) > 1
    assert several["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert one["tokens/s"] > 0 and one["MFU"] > 0 and {"work", "target-5-out", "features"} <= set(one["waits s"])
    assert [len(found["memory GiB, measured and predicted"]) for found in (one, several)] == [1, 2]
    lines = [{"workload": "tiny", "topology": name, **found} for name, found in (("6+2", one), ("2 x 3+1", several))]
    assert compare_processes(lines)[0].startswith("tiny: 2 x 3+1 / 6+2: speed x ")


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_fault_in_one_of_eight_loops_ends_them_all(role: str, server: ForkServer, tmp_path: Path) -> None:
    words = ("--targets", SIX, "--drafters", TWO, "--steps", "12", "--fault", role)
    found = found_by(start(server, tmp_path, words))
    assert found["told"].startswith(f"stage '{role}-") and "RuntimeError: made to fail" in found["told"]
    assert found["told after s"] < 2.0 and found["threads left"] == []


def test_cases_without_gpus_are_named_and_measured_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    measured = {"workload": "8b", "topology": "6+2", "tokens/s": 1234.0, "MFU": 0.5, "losses": []}
    out = tmp_path / "lines.jsonl"
    out.write_text(json.dumps(measured) + "\n")
    assert main(["--out", str(out), "--only", "8b 6+2,27b 6+2"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["topology"] for line in lines if "skipped" in line} >= {"6+2", "alone"}
    assert any(line.get("skipped") == "needs 8 GPUs, there are 0" for line in lines)
    assert "1,234" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--stage-ms", "1", "2"])
