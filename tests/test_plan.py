"""Plans: derived numbers, checks that need target, machine or store, and every recipe of the repository."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.devices import make_devices, stage_threads
from helixctl.errors import ModelError, RecipeError
from helixctl.lm_plan import make_any_plan
from helixctl.machine import Gpu, Machine, World
from helixctl.models.taps import default_target_layer_ids
from helixctl.plan import Plan, advised_slots, make_plan
from helixctl.plugins import DRAFTERS, plugin_names
from helixctl.recipe.load import load_any_recipe, load_recipe
from helixctl.recipe.schema import PipelineOptions, Recipe

ROOT = Path(__file__).parent.parent
QWEN3_8B = ROOT / "tests/fixtures/qwen3-8b-config.json"
CPU = Machine(num_cpus=2, total_memory_bytes=24 << 30, has_bf16_cpu=True)
H200 = Gpu("NVIDIA H200", "GPU-0", 141 << 30)
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 128,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
TEXT = f"""\
run: {{dir: run}}
target: {{model: model}}
data: {{train: [{{path: a.jsonl}}], store: store, seq_len: 64}}
drafter: {{algorithm: {plugin_names(DRAFTERS)[0]}, num_layers: 2, block_size: 4, num_anchors: 8, mask_token_id: 100}}
train: {{steps: 100, warmup_ratio: 0.05, micro_batch_rows: 2, grad_accum_steps: 3}}
"""


def machine(num_gpus: int, **more: int) -> Machine:
    gpus = tuple(replace(H200, uuid=f"GPU-{i}") for i in range(num_gpus))
    return Machine(num_cpus=more.get("num_cpus", 64), total_memory_bytes=512 << 30, gpus=gpus)


@pytest.fixture
def recipe(tmp_path):
    def load(*overrides: str, **config: object) -> Recipe:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model/config.json").write_text(json.dumps({**SMALL, **config}), encoding="utf-8")
        (tmp_path / "recipe.yaml").write_text(TEXT, encoding="utf-8")
        return load_recipe(tmp_path / "recipe.yaml", overrides)

    return load


def problem(recipe: Recipe, where: Machine = CPU):
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe, where)
    assert caught.value.exit_code == 2
    (found,) = caught.value.problems
    assert found.fix
    return found


# ---------------------------------------------------------------------------------------------------------------- taps


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        (36, 1, (18,)),
        (1, 1, (0,)),
        (4, 4, (0, 1, 2, 3)),
        (4, 2, (0, 3)),
    ],
)
def test_taps_are_the_published_ones(num_layers, num_taps, expected):
    assert default_target_layer_ids(num_layers, num_taps) == expected


@given(num_layers=st.integers(1, 130), data=st.data())
def test_taps_are_distinct_sorted_and_in_range(num_layers, data):
    num_taps = data.draw(st.integers(1, num_layers))
    ids = default_target_layer_ids(num_layers, num_taps)
    assert len(ids) == num_taps
    assert list(ids) == sorted(set(ids))
    assert ids[0] >= 0 and ids[-1] < num_layers


# ------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("num_gpus", "options", "targets", "drafters"),
    [
        (0, {}, "cpu", "cpu"),
        (1, {}, "0", "0"),
        (2, {}, "0", "1"),
        (3, {}, "01", "2"),
        (4, {}, "012", "3"),
        (8, {}, "012345", "67"),
        (4, {"targets": ("cuda:3",)}, "3", "012"),
        (4, {"drafters": ("cuda:0",)}, "123", "0"),
        (1, {"targets": ("cuda:0",)}, "0", "0"),
        (0, {"targets": ("cpu", "cpu")}, "cpu cpu", "cpu"),
        (0, {"drafters": ("cpu", "cpu")}, "cpu", "cpu cpu"),
        (2, {"targets": ("cuda:0", "cuda:1"), "drafters": ("cuda:1",)}, "01", "1"),
    ],
)
def test_devices(num_gpus, options, targets, drafters):
    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split()) if "cpu" in text else tuple(f"cuda:{i}" for i in text)

    found = make_devices(PipelineOptions(**options), machine(num_gpus))
    assert found == (names(targets), names(drafters))


@given(num_targets=st.integers(1, 16), num_drafters=st.integers(1, 8))
def test_advised_slots_are_the_smallest_that_never_stall(num_targets, num_drafters):
    slots = advised_slots(num_targets, num_drafters)
    enough = 2 * num_targets + num_drafters
    assert slots * num_drafters >= enough > (slots - 1) * num_drafters


# ------------------------------------------------------------------------------------------------------------- numbers


def test_numbers_of_a_small_run_without_a_store(recipe):
    plan = make_plan(recipe("pipeline.drafters=[cpu, cpu]"), CPU)
    assert (plan.batches_per_step, plan.rows_per_step, plan.tokens_per_step) == (6, 12, 768)
    assert (plan.total_steps, plan.warmup_steps) == (100, 5)
    assert plan.validation_batches == 32
    assert plan.target_layer_ids == (1, 3)
    assert (plan.target_dtype, plan.compute_dtype, plan.threads, plan.num_slots) == ("bfloat16", "bfloat16", 2, 2)
    assert plan.disk_bytes_per_checkpoint == 12 * plan.parameters
    assert plan.train_documents is None and plan.supervised_share is None
    (warning,) = plan.warnings
    assert "run `helixctl prepare` first" in warning


def test_steps_are_unknown_without_a_store_when_epochs_are_given(recipe):
    plan = make_plan(recipe("train.steps=null", "train.epochs=2"), CPU)
    assert plan.total_steps is None and plan.warmup_steps is None


def test_validation_can_be_off(recipe):
    assert make_plan(recipe("validation.every_steps=0"), CPU).validation_batches == 0


@pytest.mark.parametrize(
    ("where", "options", "expected"),
    [
        (CPU, (), ("bfloat16", "bfloat16")),
        (replace(CPU, has_bf16_cpu=False), (), ("float32", "float32")),
        (replace(CPU, has_bf16_cpu=False), ("target.dtype=bfloat16",), ("bfloat16", "float32")),
        (CPU, ("target.dtype=float32", "train.compute_dtype=float32"), ("float32", "float32")),
        (machine(1), (), ("bfloat16", "bfloat16")),
    ],
)
def test_dtypes(recipe, where, options, expected):
    plan = make_plan(recipe(*options), where)
    assert (plan.target_dtype, plan.compute_dtype) == expected


def test_float16_checkpoints_compute_in_bfloat16_on_a_cpu(recipe):
    assert make_plan(recipe(dtype="float16"), CPU).target_dtype == "bfloat16"
    assert make_plan(recipe(dtype="float16"), machine(1)).target_dtype == "float16"


@pytest.mark.parametrize(
    ("num_cpus", "options", "threads"), [(1, (), 1), (4, (), 4), (64, (), 32), (64, ("pipeline.threads=5",), 5)]
)
def test_cores_are_shared_when_there_are_many(recipe, num_cpus, options, threads):
    assert make_plan(recipe(*options), replace(CPU, num_cpus=num_cpus)).threads == threads


@given(num_cpus=st.integers(1, 256), local_size=st.integers(1, 64), num_stages=st.integers(1, 9))
def test_a_stage_has_no_more_threads_than_its_process_has_cores(num_cpus, local_size, num_stages):
    world = World(size=local_size, local_size=local_size)
    threads = stage_threads(PipelineOptions(), replace(CPU, num_cpus=num_cpus, world=world), num_stages)
    alone = stage_threads(PipelineOptions(), replace(CPU, num_cpus=max(1, num_cpus // local_size)), num_stages)
    assert threads == alone
    assert threads == 1 or threads * local_size <= num_cpus


def test_recurrent_targets_are_not_packed(recipe):
    plan = make_plan(recipe(layer_types=["linear_attention"] * 6), CPU)
    assert not plan.packing
    assert any("row of its own" in warning for warning in plan.warnings)


def test_what_deserves_a_warning(recipe):
    options = recipe("pipeline.slots=1", "data.seq_len=512")
    needed = sum(line.num_bytes for line in make_plan(options, CPU).memory)
    plan = make_plan(options, replace(CPU, total_memory_bytes=needed))
    text = " ".join(plan.warnings)
    assert "pipeline.slots is 1" in text
    assert "longer than the target's 256 positions" in text
    assert "cpu needs about" in text
    assert not plan.lacks


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        (("drafter.num_anchors=200", "train.micro_batch_rows=64"), "train.pass_rows", "drafter activations"),
        (("pipeline.slots=90000",), "pipeline.slots", "slots"),
        (("target.feature_cache_mib=900000",), "target.feature_cache_mib", "feature cache"),
    ],
)
def test_what_cannot_fit_is_told_with_the_setting_that_helps(recipe, options, key, words):
    lacking = make_plan(recipe(*options), replace(CPU, total_memory_bytes=400 << 20))
    (found,) = lacking.lacks
    assert found.key == key
    assert f"the largest part is {words}" in found.message
    assert found.fix is not None and key in found.fix
    assert not any("needs about" in warning for warning in lacking.warnings)
    assert not make_plan(recipe(*options), replace(CPU, total_memory_bytes=1 << 50)).lacks


# -------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("option", "key", "words"),
    [
        ("drafter.mask_token_id=128", "drafter.mask_token_id", "embedding has 128 rows"),
        ("drafter.mask_token_id=2", "drafter.mask_token_id", "end-of-text token"),
        ("drafter.mask_token_id=0", "drafter.mask_token_id", "padding token"),
        ("drafter.target_layer_ids=[1, 6]", "drafter.target_layer_ids", "layers are 0 to 5"),
        ("drafter.target_layer_ids=[1, 1]", "drafter.target_layer_ids", "tapped once"),
        ("drafter.target_layer_ids=[3, 1]", "drafter.target_layer_ids", "ascending order"),
        ("drafter.target_layer_ids=[]", "drafter.target_layer_ids", "is empty"),
        ("drafter.num_taps=7", "drafter.num_taps", "only 6 layers"),
        ("pipeline.targets=[gpu]", "pipeline.targets", "is no device"),
        ("pipeline.drafters=['cuda:0']", "pipeline.drafters", "has no cuda:0"),
        ("pipeline.targets=[]", "pipeline.targets", "is empty"),
    ],
)
def test_options_that_do_not_fit(recipe, option, key, words):
    found = problem(recipe(option))
    assert found.key == key
    assert words in found.message


def test_all_misfits_are_told_at_once(recipe):
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe("drafter.mask_token_id=999", "drafter.num_taps=9", "pipeline.targets=[x]"), CPU)
    assert len(caught.value.problems) == 3


def test_heads_that_do_not_fit_are_the_plug_ins_to_refuse(recipe):
    with pytest.raises(ModelError):
        make_plan(recipe(num_key_value_heads=3), CPU)


# ------------------------------------------------------------------------------------------------ repository's recipes


def plan_recipe(name: str, where: Machine, *overrides: str) -> Plan:
    return make_plan(load_recipe(ROOT / "recipes" / name, overrides), where)


def together(plan: Plan, device: str) -> float:
    return sum(line.num_bytes for line in plan.memory if line.device == device) / 2**30


def test_8b_on_one_gpu_fits():
    plan = plan_recipe("qwen3-8b-dflash.yaml", machine(1), f"target.config={QWEN3_8B}")
    assert plan.target_devices == plan.drafter_devices == ("cuda:0",)
    assert plan.parameters == pytest.approx(1.049e9, rel=1e-3)
    assert (plan.rows_per_step, plan.num_slots) == (32, 3)
    assert 50 < together(plan, "cuda:0") < 134
    assert not any("needs about" in warning for warning in plan.warnings)


def test_8b_on_eight_gpus_takes_the_same_steps():
    plan = plan_recipe("qwen3-8b-dflash-6x2.yaml", machine(8), f"target.config={QWEN3_8B}")
    assert (len(plan.target_devices), len(plan.drafter_devices)) == (6, 2)
    assert (plan.rows_per_step, plan.batches_per_step, plan.num_slots) == (32, 8, 7)
    assert "target weights" not in {line.name for line in plan.memory if line.device == "cuda:7"}
    assert "embedding and head" in {line.name for line in plan.memory if line.device == "cuda:7"}
    assert not any("needs about" in warning for warning in plan.warnings)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_plans(path, tmp_path, monkeypatch):
    monkeypatch.setenv("LM_TEXT", str(tmp_path))
    (tmp_path / "config.json").write_text(
        json.dumps({**SMALL, "vocab_size": 200_000, "num_hidden_layers": 36}), encoding="utf-8"
    )
    overrides = [f"data.store={tmp_path / 'none'}"]
    if "kind: causal_lm" not in path.read_text(encoding="utf-8"):
        overrides.append(f"target.model={tmp_path}")
    plan = make_any_plan(load_any_recipe(path, overrides), machine(8))
    json.dumps(plan.to_json())


def test_processes_share_a_host_and_take_one_step_together(recipe):
    plans = [
        make_plan(recipe("pipeline.targets=[cuda:0]"), replace(machine(4), world=World(4, rank, 2, rank % 2)))
        for rank in range(4)
    ]
    assert [plan.target_devices for plan in plans] == [("cuda:0",), ("cuda:2",)] * 2
    assert [plan.drafter_devices for plan in plans] == [("cuda:1",), ("cuda:3",)] * 2
    assert {(plan.num_drafters, plan.batches_per_step, plan.rows_per_step) for plan in plans} == {(4, 12, 24)}
    assert {plan.threads for plan in plans} == {64 // (2 * 2)}
    assert json.loads(json.dumps(plans[3].to_json()))["world"]["rank"] == 3


def test_foreign_code_is_shown_loudly(recipe):
    plan = make_plan(recipe("target.trust_remote_code=true"), machine(1))
    assert any("runs with your rights" in warning for warning in plan.warnings)
    assert not any("rights" in warning for warning in make_plan(recipe(), machine(1)).warnings)


def test_gpus_that_cannot_be_shared_out_are_refused(recipe):
    with pytest.raises(RecipeError, match="3 GPUs cannot be shared out evenly to 2 processes"):
        make_plan(recipe(), replace(machine(3), world=World(2, 0, 2, 0)))
    with pytest.raises(RecipeError, match="each process has no cuda:1"):
        make_plan(recipe("pipeline.targets=[cuda:1]"), replace(machine(2), world=World(2, 0, 2, 0)))


@pytest.mark.parametrize(("gib", "rows"), [(1000, 4), (139, 2), (40, 1)])
def test_passes_hold_as_many_rows_as_a_tenth_of_the_gpu(recipe, gib, rows):
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    eight_b = recipe(
        "drafter.num_layers=4",
        "drafter.num_taps=4",
        "drafter.num_anchors=512",
        "drafter.block_size=16",
        "data.seq_len=3072",
        "train.micro_batch_rows=4",
        **shape,
        head_dim=128,
    )
    gpu = replace(H200, memory_bytes=gib << 30)
    assert make_plan(eight_b, replace(machine(1), gpus=(gpu,))).pass_rows == rows
    assert make_plan(eight_b, CPU).pass_rows == 4  # a CPU's caches gain nothing


def test_rows_of_a_pass_must_divide_the_micro_batch(recipe):
    with pytest.raises(RecipeError, match=r"train.pass_rows.*is 4.*does not divide"):
        make_plan(recipe("train.micro_batch_rows=6", "train.pass_rows=4"), CPU)
    assert make_plan(recipe("train.micro_batch_rows=6", "train.pass_rows=3"), machine(1)).pass_rows == 3
