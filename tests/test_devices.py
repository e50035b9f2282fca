"""Targets over several devices, from the recipe to a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixctl.checkpoint.store import load_checkpoint
from helixctl.cli.render import render_plan
from helixctl.devices import make_spans
from helixctl.errors import RecipeError
from helixctl.machine import Gpu, Machine, World
from helixctl.plan import make_plan
from helixctl.recipe.load import load_recipe
from helixctl.recipe.schema import PipelineOptions
from helixctl.training.run import run_training
from tests.training.worlds import make_world, make_world_plan, tensors_equal

GPUS = tuple(Gpu("H200", f"GPU-{i}", 140 << 30) for i in range(8))
PAIR = {"devices": ("cuda:0", "cuda:1")}


ALONE = World()


def machine(num_gpus: int, world: World = ALONE) -> Machine:
    return Machine(num_cpus=16, total_memory_bytes=1 << 40, gpus=GPUS[:num_gpus], world=world)


def test_drafters_get_the_gpus_that_no_layer_stands_on() -> None:
    options = PipelineOptions.model_validate({"targets": (PAIR, PAIR, {"devices": ("cuda:2", "cuda:3")})})
    spans, drafters = make_spans(options, machine(6))
    assert spans == (("cuda:0", "cuda:1"), ("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"))
    assert drafters == ("cuda:4", "cuda:5")
    assert make_spans(PipelineOptions.model_validate({"targets": (PAIR,)}), machine(2))[1] == ("cuda:1",)


def test_a_process_of_several_counts_from_its_own_first_gpu() -> None:
    options = PipelineOptions.model_validate({"targets": (PAIR,)})
    spans, drafters = make_spans(options, machine(8, World(2, 1, 2, 1)))
    assert (spans, drafters) == ((("cuda:4", "cuda:5"),), ("cuda:6", "cuda:7"))


def test_weights_are_counted_where_their_layers_stand(tmp_path: Path) -> None:
    recipe = make_world(tmp_path)
    where = "pipeline.targets=[{devices: ['cuda:0', 'cuda:1']}, {devices: ['cuda:0', 'cuda:1']}]"
    plans = [make_plan(load_recipe(recipe, [value]), machine(3)) for value in (where, "pipeline.targets=['cuda:0']")]
    spread, whole = (
        {line.device: line.num_bytes for line in plan.memory if line.name == "target weights"} for plan in plans
    )
    assert spread["cuda:0"] == spread["cuda:1"] == pytest.approx(whole["cuda:0"] / 2, abs=1)
    assert plans[0].target_devices == ("cuda:1", "cuda:1") and plans[0].drafter_devices == ("cuda:2",)
    assert plans[0].span_of("cuda:1") == ("cuda:0", "cuda:1") and plans[0].span_of("cuda:2") == ("cuda:2",)
    features = {line.device for line in plans[0].memory if line.name == "features in flight"}
    assert features == {"cuda:1"}


def test_a_plan_shows_all_devices_of_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = "pipeline.targets=[{devices: [cpu, cpu]}, {devices: [cpu, cpu]}]"
    render_plan(make_world_plan(make_world(tmp_path), where))
    assert "2 x cpu and cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        ("[{devices: ['cuda:0', 'cuda:9']}]", "has no cuda:9"),
        ("[{devices: ['cuda:0', 'cuda:1']}, 'cuda:1']", "begin on others"),
        ("[{devices: []}]", "at least 1"),
        ("[{device: 'cuda:0'}]", "device"),
    ],
)
def test_what_cannot_be_is_told_by_its_key(targets: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        make_plan(load_recipe(make_world(tmp_path), [f"pipeline.targets={targets}"]), machine(3))
    assert text in str(caught.value) and "pipeline.targets" in str(caught.value)


def test_a_run_with_a_spread_target_takes_the_same_steps_bit_for_bit(tmp_path: Path) -> None:
    recipe = make_world(tmp_path)
    for name, targets in (("one", "[cpu]"), ("spread", "[{devices: [cpu, cpu, cpu]}, {devices: [cpu, cpu, cpu]}]")):
        plan = make_world_plan(recipe, f"run.dir={tmp_path / name}", f"pipeline.targets={targets}")
        assert run_training(plan).finished
    one, other = (load_checkpoint(tmp_path / name / "checkpoints" / "step-00000006") for name in ("one", "spread"))
    assert tensors_equal(one.tensors["drafter"], other.tensors["drafter"])
