"""What a run says about memory: the peak beside the prediction, and advice when it runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helixctl.errors import StageFailed
from helixctl.machine import Gpu, Machine
from helixctl.memory import CUDA_LINE
from helixctl.plan import make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training.peaks import expected_peaks, measured_peaks, with_memory_advice
from helixctl.training.run import run_training
from tests.lm_worlds import make_lm_world
from tests.training.worlds import make_world, make_world_plan

GPU = Machine(num_cpus=4, total_memory_bytes=8 << 30, gpus=(Gpu("H200", "GPU-0", 80 << 30),))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def test_every_run_reports_its_peak_beside_the_prediction(recipe: Path, tmp_path: Path) -> None:
    plan = make_world_plan(recipe, f"run.dir={tmp_path / 'run'}", "train.steps=1")
    run_training(plan)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["predicted_memory_bytes"] == {"host": sum(line.num_bytes for line in plan.memory)}
    assert result["peak_memory_bytes"]["host"] > 100 << 20
    assert result["reserved_memory_bytes"] == {}
    assert result["compiled"] == {}


PEAK = "from helixctl.training.peaks import process_peak; print(process_peak())"
LARGE = f"""
import subprocess, sys
held = b"x" * (2 << 30)
subprocess.run([sys.executable, "-c", {PEAK!r}], check=True)
"""


def test_a_process_does_not_inherit_the_peak_of_the_one_that_started_it() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1 << 30


DRAFTER = ("drafter.intermediate_size=16384", "drafter.num_layers=3", "train.steps=2")
LM_SIZES = "vocab_size: 32000, hidden_size: 128, intermediate_size: 512, num_hidden_layers: 2, num_attention_heads: 4"
LM = (f"model.config={{model_type: llama, {LM_SIZES}}}", "data.seq_len=128", "train.micro_batch_rows=4")
LM_STEPS = ("stages.0.steps=1", "stages.1.steps=1")


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="builds for CUDA differ in what their libraries take")
@pytest.mark.parametrize(("make", "sizes"), [(make_world, DRAFTER), (make_lm_world, LM + LM_STEPS)])
def test_the_prediction_for_a_cpu_is_within_a_tenth_of_a_process(make, sizes, tmp_path: Path) -> None:
    """In a process of its own: everything that it ever held counts, its libraries too."""
    values = [f"run.dir={tmp_path / 'run'}", "pipeline.threads=1", *sizes]
    words = ["train", str(make(tmp_path)), *(word for value in values for word in ("--set", value))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "helixctl", *words], env=environment, check=True, capture_output=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    told, itself = (result[name]["host"] for name in ("predicted_memory_bytes", "process_memory_bytes"))
    assert told > 1.2 * itself, "large enough that the run's own part shows"
    assert told / result["peak_memory_bytes"]["host"] == pytest.approx(1.0, abs=0.1)


def test_a_gpu_is_compared_with_what_the_allocator_counts(recipe: Path) -> None:
    plan = make_plan(load_recipe(recipe), GPU)
    counted = sum(line.num_bytes for line in plan.memory if line.name != CUDA_LINE)
    assert expected_peaks(plan) == {"cuda:0": counted}
    assert set(measured_peaks(make_world_plan(recipe))) == {"host"}


@pytest.mark.parametrize("cause", [torch.OutOfMemoryError("tried to allocate 2 GiB"), MemoryError()])
def test_memory_that_runs_out_comes_with_the_plans_advice(recipe: Path, monkeypatch, cause: Exception) -> None:
    plan = make_plan(load_recipe(recipe), GPU)
    failed = StageFailed("drafter-0", cause)
    failed.__cause__ = cause
    fix = with_memory_advice(plan, failed).fix
    assert fix is not None
    assert "the plan expects" in fix and "GiB on cuda:0" in fix and "the largest part is" in fix
    assert "expandable_segments" in fix
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "expandable_segments" not in (with_memory_advice(plan, failed).fix or "")


def test_other_failures_keep_their_own_advice(recipe: Path) -> None:
    failed = StageFailed("drafter-0", ValueError("other"))
    failed.__cause__ = ValueError("other")
    assert with_memory_advice(make_world_plan(recipe), failed).fix is None


@pytest.mark.gpu
def test_the_prediction_on_a_gpu(recipe: Path, tmp_path: Path) -> None:
    """A drafter large enough that its own tensors, not the libraries' workspaces, make the peak."""
    sizes = ["drafter.intermediate_size=8192", "drafter.head_dim=64", "drafter.num_anchors=512", "data.seq_len=512"]
    overrides = [*sizes, "train.micro_batch_rows=4", "train.steps=2", f"run.dir={tmp_path / 'run'}"]
    devices = ["pipeline.targets=['cuda:0']", "pipeline.drafters=['cuda:0']"]
    torch.cuda.reset_peak_memory_stats()
    result = run_training(make_plan(load_recipe(recipe, [*overrides, *devices]), GPU))
    told = result.predicted_memory_bytes["cuda:0"] / result.peak_memory_bytes["cuda:0"]
    assert told == pytest.approx(1.0, abs=0.25)
