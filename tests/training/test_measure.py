"""Times of real stages on a tiny plan, and the comparison of placements with invented ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from helixctl.errors import UsageError
from helixctl.machine import Gpu, Machine, World
from helixctl.plan import make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training import measure as measuring
from helixctl.training.measure import compare, measure
from helixctl.training.placement import Pace, recommend
from tests.training.worlds import MACHINE, make_world, make_world_plan


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def host(num_gpus: int, memory_bytes: int = 80 << 30) -> Machine:
    gpus = tuple(Gpu("H200", f"GPU-{i}", memory_bytes) for i in range(num_gpus))
    return Machine(num_cpus=8, total_memory_bytes=64 << 30, gpus=gpus)


@pytest.mark.parametrize("with_data", [True, False])
def test_both_stages_are_timed_with_their_own_code(recipe, tmp_path, monkeypatch, with_data) -> None:
    monkeypatch.setattr(measuring, "ENOUGH_S", 0.0)
    data = [] if with_data else [f"data.store={tmp_path / 'none'}"]
    plan = make_world_plan(recipe, f"run.dir={tmp_path / 'run'}", "train.grad_accum_steps=2", *data)
    found = measure(plan, MACHINE)
    assert found.pace.target_s > 0 and found.pace.drafter_s > 0
    assert (found.batches, found.pace.tokens) == (
        ("the first of the store", pytest.approx(25, abs=7)) if with_data else ("made up, full", 32.0)
    )
    rate = found.pace.tokens / (found.pace.target_s + found.pace.drafter_s)
    assert found.current.tokens_per_s == pytest.approx(rate)
    assert found.recommended == found.current == found.placements[0]
    assert not (tmp_path / "run").exists()


def test_every_gpu_is_used_in_the_best_ratio(recipe) -> None:
    machine = host(4)
    plan = make_plan(load_recipe(recipe), machine)
    found = compare(plan, machine, Pace(3.0, 1.0, 100.0))
    best = recommend(found)
    assert best is not None
    assert (best.targets, best.drafters) == (machine.own_gpus[:3], machine.own_gpus[3:])
    assert best.tokens_per_s == pytest.approx(100.0)
    assert len(found) == 4 + 3
    assert found == sorted(found, key=lambda placement: -placement.tokens_per_s)


def test_what_no_gpu_holds_is_marked(recipe) -> None:
    roomy = make_plan(load_recipe(recipe), host(2))
    apart = max(sum(line.num_bytes for line in roomy.memory if line.device == d) for d in ("cuda:0", "cuda:1"))
    tight = host(2, int(apart / 1.1) + (1 << 10))
    marks = {p.together: p.fits for p in compare(roomy, tight, Pace(1.0, 1.0, 1.0))}
    assert marks == {True: False, False: True}


def test_it_is_one_process(recipe) -> None:
    plan = make_plan(load_recipe(recipe), dataclasses.replace(MACHINE, world=World(2, 0, 2, 0)))
    with pytest.raises(UsageError, match="one process"):
        measure(plan, MACHINE)
