"""Fine-tuning: a z-lab checkpoint as its authors write it, parts that stay as they are, a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helixctl.checkpoint.store import load_checkpoint
from helixctl.errors import RecipeError
from helixctl.models.drafters._parts import belongs
from helixctl.training.commands import ExportRequest, run_export
from helixctl.training.run import run_training
from tests.training.conftest import TrainedWorld

SIZES = (
    "drafter={algorithm: dflash, init_from: %s, num_anchors: 8}",
    "train.steps=1",
    "train.learning_rate=1e-12",
)


@pytest.fixture(scope="module")
def theirs(trained: TrainedWorld) -> Path:
    """The trained drafter as z-lab publishes: keys in one place, two files, a copy of the rotary frequencies."""
    own = trained.recipe.parent / "own"
    run_export(trained.plan("drafter.rope_theta=500.0"), ExportRequest(output=own, format="zlab"))
    folder = trained.recipe.parent / "theirs"
    folder.mkdir()
    config = json.loads((own / "config.json").read_text())
    for key in ("exported_by", "is_causal", "auto_map", "rope_theta", "pad_token_id"):
        config.pop(key)
    config["dflash_config"] = {key: config["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(own / "model.safetensors")
    tensors["rotary_emb.inv_freq"] = torch.ones(8)
    names = sorted(tensors)
    for number, part in enumerate((names[:9], names[9:]), start=1):
        file = folder / f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, file)
    index = {name: f"model-0000{1 if i < 9 else 2}-of-00002.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def drafter_of(run_dir: Path) -> Any:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return load_checkpoint(newest).tensors


def test_weights_and_configuration_of_a_zlab_checkpoint_begin_a_run(
    trained: TrainedWorld, theirs: Path, tmp_path: Path
) -> None:
    plan = trained.plan(*(option.replace("%s", str(theirs)) for option in SIZES), f"run.dir={tmp_path / 'run'}")
    drafter = plan.recipe.drafter
    assert (drafter.block_size, drafter.num_layers, drafter.mask_token_id) == (4, 2, 310)
    assert drafter.target_layer_ids == plan.target_layer_ids == (0, 2)
    assert drafter.rope_theta == 500.0  # its own, not the target's
    run_training(plan)
    begun = drafter_of(tmp_path / "run")["drafter"]
    published: dict[str, torch.Tensor] = {}
    for file in sorted(theirs.glob("*.safetensors")):
        published |= load_file(file)
    for name, tensor in begun.items():
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor, published[name].float(), atol=1e-9), name


def test_what_the_recipe_says_comes_before_the_configuration(trained: TrainedWorld, theirs: Path) -> None:
    options = [option.replace("%s", str(theirs)) for option in SIZES]
    assert trained.plan(*options, "drafter.block_size=6").recipe.drafter.block_size == 6
    assert trained.plan(*options, "drafter.num_taps=3").target_layer_ids == (0, 2, 3)


def test_a_configuration_that_cannot_be_computed_is_a_mistake_in_the_recipe(
    trained: TrainedWorld, theirs: Path, tmp_path: Path
) -> None:
    config = json.loads((theirs / "config.json").read_text())
    for name, text, words in (
        ("windows", json.dumps(config | {"layer_types": ["sliding_attention"] * 2}), "sliding windows"),
        ("torn", "{", "cannot be read"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
        with pytest.raises(RecipeError, match=words):
            trained.plan(*(option.replace("%s", str(tmp_path / name)) for option in SIZES))


@pytest.mark.parametrize("parts", ["[fc, layers.0]", "['layers.*.mlp', hidden_norm]"])
def test_frozen_parts_stay_bit_for_bit_and_the_rest_learns(
    trained: TrainedWorld, theirs: Path, tmp_path: Path, parts: str
) -> None:
    options = [f"drafter.init_from={theirs}", "drafter.rope_theta=500", f"drafter.freeze={parts}"]
    runs = {}
    for name, steps in (("none", ["train.steps=1", "train.learning_rate=1e-12"]), ("some", ["train.steps=3"])):
        plan = trained.plan(*options, *steps, f"run.dir={tmp_path / name}", "validation.every_steps=0")
        run_training(plan)
        runs[name] = drafter_of(tmp_path / name)
    begun, after = runs["none"]["drafter"], runs["some"]["drafter"]
    frozen = plan.recipe.drafter.freeze
    for name, tensor in after.items():
        assert torch.equal(tensor, begun[name]) == belongs(name, frozen), name
    assert not any(belongs(name, frozen) for name in runs["some"]["optimizer"])
    assert plan.frozen_parameters == sum(t.numel() for name, t in after.items() if belongs(name, frozen))
    assert plan.frozen_parameters + plan.parameters == sum(t.numel() for t in after.values())


def test_a_run_with_frozen_parts_goes_on_bit_for_bit(trained: TrainedWorld, tmp_path: Path) -> None:
    options = ("drafter.freeze=[fc]", "train.steps=4", "validation.every_steps=0")
    run_training(trained.plan(*options, f"run.dir={tmp_path / 'whole'}"))
    run_training(trained.plan(*options, f"run.dir={tmp_path / 'again'}"))
    newest = tmp_path / "again" / "checkpoints" / "step-00000004"
    (newest / "drafter.safetensors").unlink()
    run_training(trained.plan(*options, f"run.dir={tmp_path / 'again'}"), resume=True)
    one, two = drafter_of(tmp_path / "whole"), drafter_of(tmp_path / "again")
    assert all(torch.equal(one[part][name], two[part][name]) for part in one for name in one[part])


def test_frozen_parts_need_less_memory_and_less_disk(trained: TrainedWorld) -> None:
    def cost(plan: Any) -> tuple[int, int]:
        return sum(line.num_bytes for line in plan.memory), plan.disk_bytes_per_checkpoint

    whole, part = trained.plan(), trained.plan("drafter.freeze=[layers]")
    frozen = part.frozen_parameters
    memory, disk = (a - b for a, b in zip(cost(whole), cost(part), strict=True))
    assert (memory, disk) == (12 * frozen, 8 * frozen)  # gradients and moments; moments


@pytest.mark.parametrize(
    ("parts", "words"), [("[layer.0]", "no part 'layer.0'"), ("['*']", "nothing is left"), ("[layers.9]", "layers.9")]
)
def test_parts_that_do_not_exist_are_refused_before_anything_is_loaded(
    trained: TrainedWorld, parts: str, words: str
) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        trained.plan(f"drafter.freeze={parts}")
    assert caught.value.problems[0].key == "drafter.freeze"


def test_names_belong_to_their_parts_piece_by_piece() -> None:
    name = "layers.1.self_attn.q_proj.weight"
    for part in ("layers", "layers.1", "layers.*.self_attn", "*.1", name):
        assert belongs(name, [part])
    for part in ("layer", "layers.1.mlp", "layers.11", "q_proj", name + ".x"):
        assert not belongs(name, [part])
