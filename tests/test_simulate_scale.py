"""The simulation of more GPUs: against what follows by arithmetic, and against the real pipeline on a CPU."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.models.target import Target
from helixctl.training.run import run_training
from scripts.simulate_scale import Costs, Layout, Links, best, layouts, main, read_report, reduce_seconds, simulate
from tests.profiling.subjects import stage_facts
from tests.training.worlds import make_world, make_world_plan

STEADY = Costs(read_s=0.0, target_s=0.010, post_s=0.0, drafter_s=0.004, tokens=100.0, spread=0.0)
MILLISECONDS = st.floats(0.1, 20.0).map(lambda ms: ms / 1e3)


@given(
    costs=st.builds(Costs, MILLISECONDS, MILLISECONDS, MILLISECONDS, MILLISECONDS, st.just(1.0), st.just(0.0)),
    targets=st.integers(1, 6),
    drafters=st.integers(1, 3),
)
def test_with_enough_slots_the_slowest_stage_sets_the_speed(costs: Costs, targets: int, drafters: int) -> None:
    found = simulate(costs, Layout(1, targets, drafters, slots=40, accumulate=40), 0.0, steps=10)
    bound = min(1 / costs.read_s, targets / max(costs.target_s, costs.post_s), drafters / costs.drafter_s)
    assert found.tokens_per_s == pytest.approx(bound, rel=0.06)


def test_two_slots_per_drafter_and_one_target_overlap() -> None:
    apart = Layout(1, 1, 1, slots=1)
    assert simulate(STEADY, apart, 0.0).tokens_per_s == pytest.approx(100 / 0.014, rel=0.01)
    assert simulate(STEADY, Layout(1, 1, 1, slots=3), 0.0).tokens_per_s == pytest.approx(100 / 0.010, rel=0.01)
    shared = Layout(1, 1, 1, slots=3, shared=True)
    assert simulate(STEADY, shared, 0.0).tokens_per_s == pytest.approx(100 / 0.014, rel=0.01)


def test_adding_up_is_seen_and_more_accumulation_hides_it() -> None:
    often, seldom = (
        simulate(STEADY, Layout(1, 4, 1, slots=9, accumulate=a), reduce_s=0.004, steps=400 // a) for a in (1, 8)
    )
    assert often.tokens_per_s < seldom.tokens_per_s
    assert often.reduce_share == pytest.approx(0.5, rel=0.1) and seldom.reduce_share < 0.12


def test_gradients_cross_the_network_once_there_are_two_hosts() -> None:
    links = Links()
    inside, between = (reduce_seconds(10**9, Layout(p, 3, 1, 7), links) for p in (2, 4))
    assert inside == pytest.approx(2 * 0.5 * 4e9 / 400e9 + 2 * 20e-6)
    assert between == pytest.approx(2 * 0.75 * 4e9 / 50e9 + 4 * 20e-6)
    assert reduce_seconds(10**9, Layout(1, 7, 1, 15), links) == 0


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8, 24, 64])
def test_every_layout_uses_all_gpus_and_the_best_is_none_worse(num_gpus: int) -> None:
    links = Links()
    assert all(layout.gpus == num_gpus for layout in layouts(num_gpus, links))
    chosen, found = best(STEADY, num_gpus, 10**8, links)
    speeds = [simulate(STEADY, one, reduce_seconds(10**8, one, links)).tokens_per_s for one in layouts(num_gpus, links)]
    assert chosen.gpus == num_gpus and found.tokens_per_s >= 0.97 * max(speeds)


def report(**speeds: float) -> dict[str, Any]:
    busy = {"reader-0": 0.1, "target-0": 0.9, "target-1": 0.7, "target-0-post": 0.05, "drafter-0": 0.4}
    stages = [
        {
            "role": stage_facts(name).role,
            "busy_share": share,
            "items_per_s": 50.0 if name.startswith("target-") else 100.0,
        }
        for name, share in busy.items()
    ]
    stages[3]["items_per_s"] = 100.0
    pipeline = {"tokens_per_s": 10_000.0, "steps_per_s": 25.0, "num_slots": 5, **speeds}
    return {"stages": [*stages, {"role": "other", "cores": 0.1}], "pipeline": pipeline}


def test_costs_are_busy_time_per_micro_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, layout, measured = read_report(report())
    assert costs.target_s == pytest.approx(0.016) and costs.drafter_s == pytest.approx(0.004)
    assert costs.read_s == pytest.approx(0.001) and (costs.tokens, measured) == (100.0, 10_000.0)
    assert layout == Layout(1, 2, 1, 5, accumulate=4)
    (tmp_path / "report.json").write_text(json.dumps(report()))
    assert main([str(tmp_path / "report.json"), "--gpus", "1", "8"]) == 0
    assert "simulated 12,500 tokens/s, measured 10,000, +25.0 %" in capsys.readouterr().out
    assert main(["--costs", "0.016", "0.004", "100", "--gpus", "1"]) == 0
    assert "target 16 ms, drafter 4 ms" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.parametrize(
    ("target_alone", "drafter_alone", "measured"), [(31_100, 20_600, 20_300), (31_200, 72_900, 31_000)]
)
def test_two_gpus_measured_elsewhere_are_as_fast_as_the_simulation_says(
    target_alone: int, drafter_alone: int, measured: int
) -> None:
    """An 8B target on one H200, its drafter on another, each stage alone and then together; 512 and 128 anchors."""
    tokens = 4 * 3072.0
    costs = Costs(0.0, tokens / target_alone, 0.0013, tokens / drafter_alone, tokens, 0.0)
    assert simulate(costs, Layout(1, 1, 1, 3), 0.0).tokens_per_s == pytest.approx(measured, rel=0.02)


@pytest.mark.quiet
@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "drafters", "accumulate", "slots"), [(1, 1, 1, 3), (1, 1, 4, 1), (3, 1, 2, 7), (2, 2, 2, 3)]
)
def test_the_real_pipeline_is_as_fast_as_the_simulation_says(
    targets: int, drafters: int, accumulate: int, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages last as long as a GPU would compute, without a core: two are enough for all of them."""
    from helixctl.training.loop import TrainerStage

    recipe, target_s, drafter_s, steps = make_world(tmp_path, train=(20,) * 12), 0.060, 0.040, 24
    lasting(monkeypatch, Target, "features", target_s)
    lasting(monkeypatch, TrainerStage, "_accumulate", drafter_s)
    given = {"targets": targets, "drafters": drafters}
    where = [f"pipeline.{name}=[{', '.join(['cpu'] * number)}]" for name, number in given.items()]
    more = ["data.packing=false", "validation.every_steps=0", "checkpoint.every_steps=1000", "pipeline.threads=1"]
    more += [f"train.grad_accum_steps={accumulate}", f"train.steps={steps}", f"pipeline.slots={slots}"]
    result = run_training(make_world_plan(recipe, *where, *more))
    costs = Costs(0.0, target_s, 0.0, drafter_s, 20.0, 0.0)
    simulated = simulate(costs, Layout(1, targets, drafters, slots, accumulate), 0.0).tokens_per_s
    assert result.tokens_per_s == pytest.approx(simulated, rel=0.15)


def lasting(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seconds: float) -> None:
    """Let a method take ``seconds`` in all."""
    original, never = getattr(owner, name), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = original(*arguments, **options)
        never.wait(max(began + seconds - time.perf_counter(), 0.0))
        return result

    monkeypatch.setattr(owner, name, slow)
