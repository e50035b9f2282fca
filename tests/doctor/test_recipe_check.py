"""`doctor --recipe`: one fault at a time, planted into a world that is otherwise in order."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from helixctl.doctor import recipe_check
from helixctl.doctor.environment_host import Host, Space
from helixctl.doctor.probe import Outcome
from helixctl.doctor.recipe_check import RecipeCase, check_recipe
from helixctl.machine import Gpu, Machine, World
from tests.chats import make_chat_world, prepare_world, save_target
from tests.data import templates
from tests.doctor.fake_nvml import HEALTHY, FakeNvml
from tests.lm_worlds import make_lm_world
from tests.training.worlds import MACHINE, make_world_plan

Check = Callable[..., dict[str, list[Outcome]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A prepared chat world; tests only read it."""
    return prepare_world(make_chat_world(tmp_path_factory.mktemp("world")))


def check(recipe: Path, *overrides: str, machine: Machine = MACHINE, **host: Any) -> dict[str, list[Outcome]]:
    """Outcomes by ID."""
    found: dict[str, list[Outcome]] = {}
    for outcome in check_recipe(recipe, overrides, machine, Host(**{"nvml": FakeNvml(init_error=12), **host})):
        found.setdefault(outcome.id, []).append(outcome)
    return found


def states(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.state for outcome in outcomes]


def test_a_sound_recipe_has_nothing_to_mend(world: Path) -> None:
    found = check(world)
    assert {outcome.state for outcomes in found.values() for outcome in outcomes} == {"ok", "skip"}
    assert [id for id, outcomes in found.items() if states(outcomes) == ["skip"]] == ["REC012"]
    assert set(found) == {probe.id for probe in recipe_check.RECIPE}


def test_a_causal_lm_is_planned(tmp_path: Path) -> None:
    recipe = make_lm_world(tmp_path)
    (outcome,) = check(recipe)["REC001"]
    assert outcome.state == "ok" and "8 steps" in outcome.message
    (outcome,) = check(recipe, f"data.store={tmp_path / 'none'}")["REC001"]
    assert outcome.state == "warn" and "helixctl prepare" in str(outcome.remedy)
    assert states(check(recipe, "train.micro_batch_rows=10000000")["REC001"])[0] == "fail"


def test_every_mistake_of_the_recipe_is_a_finding_with_its_place(world: Path) -> None:
    found = check(world, "train.stesp=3", "drafter.block_size=1")
    assert set(found) == {"REC001"} and states(found["REC001"]) == ["fail", "fail"]
    (typo,) = (outcome for outcome in found["REC001"] if "stesp" in outcome.message)
    assert "did you mean" in str(typo.remedy) and typo.message.startswith("--set train.stesp=3: ")


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("drafter.mask_token_id=4000", "mask_token_id"),
        ("drafter.mask_token_id=257", "end-of-text"),
        ("drafter.target_layer_ids=[0, 9]", "target_layer_ids"),
        ("pipeline.targets=[cuda:3]", "no cuda:3"),
        ("target.model=/nowhere", "there is no"),
    ],
)
def test_what_the_plan_refuses_is_a_finding(world: Path, override: str, word: str) -> None:
    (outcome,) = check(world, override)["REC001"]
    assert outcome.state == "fail" and word in outcome.message and outcome.remedy


def test_the_plans_warnings_are_findings(world: Path) -> None:
    found = check(world, "pipeline.slots=1")["REC001"]
    assert states(found) == ["warn"] and "pipeline.slots is 1" in found[0].message


@pytest.mark.parametrize(
    ("override", "id", "state", "word"),
    [
        ("drafter.target_layer_ids=[0, 3]", "REC007", "warn", "behind the final norm"),
        ("data.workers=64", "REC009", "warn", "data.workers is 64"),
        ("pipeline.readers=64", "REC009", "warn", "pipeline.readers is 64"),
        ("pipeline.threads=64", "REC009", "warn", "pipeline.threads is 64"),
        ("validation.num_workers=2", "REC009", "warn", "starts no processes"),
        ("validation.every_steps=900", "REC009", "warn", "nothing shows before the end"),
        ("data.mask_policy=last_turn", "REC004", "fail", "supervises all_turns"),
        ("data.validation.fraction=0.5", "REC004", "warn", "holds 0.2 back"),
        ("drafter.mask_token_id=65", "REC006", "warn", "ordinary token"),
        ("run.dir=/proc/run", "REC010", "fail", "run.dir /proc/run cannot be written"),
        ("data.regenerate.prompts=/nowhere.jsonl", "REC010", "fail", "does not exist"),
    ],
)
def test_planted_faults(world: Path, monkeypatch, override: str, id: str, state: str, word: str) -> None:
    if "cannot be written" in word:  # tests may run as root, whom nothing is forbidden
        monkeypatch.setattr(os, "access", lambda path, _: not str(path).startswith("/proc"))
    found = check(world, override)[id]
    assert states(found) == [state] and word in found[0].message, found
    assert found[0].remedy


def test_memory_against_the_device_and_what_is_free(world: Path, monkeypatch) -> None:
    small = Machine(num_cpus=2, total_memory_bytes=1 << 19)
    assert states(check(world, machine=small)["REC008"]) == ["fail"]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("V", (), {"available": 1000}))
    found = check(world)["REC008"]
    assert states(found) == ["warn"] and "free now" in found[0].message


def test_threads_are_judged_by_the_cores_of_a_process(world: Path) -> None:
    machine = replace(MACHINE, num_cpus=4, world=World(size=2, local_size=2))
    (outcome,) = check(world, "pipeline.threads=3", machine=machine)["REC009"]
    assert outcome.state == "warn" and "3 for each stage, with 2 of 4 cores for each process" in outcome.message
    assert states(check(world, "pipeline.threads=2", machine=machine)["REC009"]) == ["ok"]


def test_memory_of_a_gpu_that_another_process_fills(world: Path) -> None:
    machine = Machine(num_cpus=2, total_memory_bytes=8 << 30, gpus=(Gpu("H200", "GPU-a", 140 << 30),))
    memory = type("M", (), {"total": 140 << 30, "used": 140 << 30})
    found = check(world, machine=machine, nvml=FakeNvml(HEALTHY | {"MemoryInfo": memory}))["REC008"]
    assert states(found) == ["warn"] and "only 0 MiB are free now" in found[0].message
    assert states(check(world, machine=machine, nvml=FakeNvml(HEALTHY))["REC008"]) == ["ok"]


@pytest.mark.parametrize(("free_bytes", "state"), [(1 << 30, "ok"), (1_800_000, "warn"), (1000, "fail")])
def test_disk(world: Path, free_bytes: int, state: str) -> None:
    case = RecipeCase(make_world_plan(world), MACHINE, Host(space=lambda _: Space(1 << 40, free_bytes)))
    needed = 5 * case.plan.disk_bytes_per_checkpoint
    case.host.space = lambda _: Space(1 << 40, needed + 1 if state == "warn" else free_bytes)
    assert recipe_check.check_disk(case).state == state


def test_determinism_on_a_gpu_needs_the_workspace(world: Path) -> None:
    machine = Machine(num_cpus=2, total_memory_bytes=8 << 30, gpus=(Gpu("H200", "GPU-a", 140 << 30),))
    words = (world, "run.deterministic=true")
    assert states(check(*words, machine=machine, environ={})["REC012"]) == ["fail"]
    assert states(check(*words, machine=machine, environ={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})["REC012"]) == ["ok"]
    assert states(check(*words, environ={})["REC012"]) == ["ok"]


def test_before_prepare_the_store_is_skipped(tmp_path: Path) -> None:
    found = check(make_chat_world(tmp_path))
    assert [states(found[id]) for id in ("REC004", "REC005")] == [["skip"], ["skip"]]
    assert states(found["REC003"]) == ["ok"]


def test_sources_and_weights_must_be_there(tmp_path: Path) -> None:
    recipe = make_chat_world(tmp_path)
    (tmp_path / "data/train.jsonl").unlink()
    for weights in (tmp_path / "target").glob("*.safetensors"):
        weights.unlink()
    found = check(recipe)["REC010"]
    assert states(found) == ["fail", "fail"]
    assert "train.jsonl does not exist" in found[0].message and "holds no weights" in found[1].message


def test_a_run_directory_in_use(tmp_path: Path) -> None:
    recipe = make_chat_world(tmp_path)
    (tmp_path / "run/checkpoints/step-00000002").mkdir(parents=True)
    found = check(recipe)["REC010"]
    assert states(found) == ["warn"] and "--resume" in str(found[0].remedy)


# ----------------------------------------------------------------------------------------- tokenizer, template, store


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A prepared world of its own, to be spoiled."""
    return prepare_world(make_chat_world(tmp_path))


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | changes), encoding="utf-8")


def test_another_template_than_the_stores(prepared: Path) -> None:
    save_target(prepared.parent / "target", templates.CHATML + "{# another #}")
    found = check(prepared)["REC004"]
    assert states(found) == ["fail"] and "chat template" in found[0].message


def test_no_template_at_all(prepared: Path) -> None:
    save_target(prepared.parent / "target", None)
    (prepared.parent / "target/chat_template.jinja").unlink(missing_ok=True)
    found = check(prepared)["REC003"]
    assert states(found) == ["fail"] and "no chat template" in found[0].message


def test_no_tokenizer(tmp_path: Path) -> None:
    recipe = make_chat_world(tmp_path)
    for file in (tmp_path / "target").glob("*token*"):
        file.unlink()
    found = check(recipe)
    assert [states(found[id]) for id in ("REC002", "REC003", "REC006")] == [["fail"]] * 3


def test_a_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    recipe = make_chat_world(tmp_path)
    edit(tmp_path / "target/config.json", vocab_size=255, eos_token_id=2, pad_token_id=0)
    found = check(recipe, "drafter.mask_token_id=250")["REC002"]
    assert states(found) == ["fail"] and "no row for the last ones" in found[0].message


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    recipe = make_chat_world(tmp_path)
    edit(tmp_path / "target/config.json", vocab_size=3200)
    assert states(check(recipe)["REC002"])[0] == "warn"


def test_an_end_of_text_that_differs(tmp_path: Path) -> None:
    recipe = make_chat_world(tmp_path)
    for name in ("config.json", "generation_config.json"):
        edit(tmp_path / "target" / name, eos_token_id=7)
    found = check(recipe)["REC002"]
    assert states(found) == ["warn"] and "[7]" in found[0].message


def test_answers_that_do_not_stop_the_target(tmp_path: Path) -> None:
    recipe = make_chat_world(tmp_path)
    save_target(tmp_path / "target", templates.CHATML.replace("<|im_end|>", "</s>"))
    found = check(prepare_world(recipe))
    assert states(found["REC003"]) == ["warn"] and "'</s>'" in found["REC003"][0].message
    assert states(found["REC005"]) == ["ok", "warn"] and "of " in found["REC005"][1].message


def test_a_torn_store(prepared: Path) -> None:
    (prepared.parent / "store/train/mask.bin").write_bytes(b"1")
    found = check(prepared)["REC001"]
    assert states(found) == ["fail"] and "torn" in found[0].message


def test_documents_that_changed_since(prepared: Path) -> None:
    with (prepared.parent / "data/train.jsonl").open("a") as file:
        file.write("{}\n")
    found = check(prepared)["REC004"]
    assert states(found) == ["warn"] and "changed since" in found[0].message


def test_a_source_that_the_store_has_never_seen(prepared: Path) -> None:
    (prepared.parent / "more.jsonl").write_text("{}\n")
    found = check(prepared, f"data.train=[{{path: {prepared.parent / 'more.jsonl'}}}]")["REC004"]
    assert states(found) == ["warn"] and "more.jsonl" in found[0].message


def test_the_command_counts_failures(world: Path, run) -> None:
    assert run("doctor", "--recipe", world).code == 0
    assert run("doctor", "--recipe", world, "--set", "data.mask_policy=last_turn").code == 1
    assert run("doctor", "--recipe", world, "--set", "pipeline.slots=1", "--fail-on", "warning").code == 1
    assert run("doctor", "--recipe", world.with_name("none.yaml")).code == 2


def test_a_float8_checkpoint_trained_on_in_full_precision_is_a_finding(world: Path, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    words = f"target.model={target}", "target.quantization=none"
    (outcome,) = check(world, *words)["REC001"]
    assert outcome.state == "warn" and "stored as float8 e4m3" in outcome.message
    assert outcome.remedy == "take target.quantization away"
    (outcome,) = check(world, words[0])["REC001"]
    assert outcome.state == "ok"
