"""`export --check`: every known fault of published drafters is named, with the engines that it breaks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helixctl.checkpoint.check import CheckResult, check_published
from helixctl.models.drafters.dflash.engines import USES
from helixctl.models.drafters.dflash.seen import SGLANG, SPECFORGE, SPECULATORS, VLLM, ZLAB
from tests.checkpoint.builders import edit_config, export_to, make_facts
from tests.cli.runner import Runner


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One export in each format, to be copied."""
    folder = tmp_path_factory.mktemp("exports")
    for name in ("zlab", "speculators"):
        export_to(folder / name, name)
    return folder


def reads(result: CheckResult) -> set[str]:
    return {view.engine for view in result.engines if view.reads}


def told(result: CheckResult) -> str:
    return "\n".join(f"{f.severity} {','.join(f.engines)}: {f.message}" for f in result.findings)


def test_our_own_exports_are_sound_for_everybody_who_reads_the_format(tmp_path: Path) -> None:
    for name, expected in (("zlab", set(USES)), ("speculators", {VLLM, SPECULATORS})):
        result = check_published(export_to(tmp_path / name, name), make_facts())
        assert reads(result) == expected, told(result)
        assert result.sound
        assert not [f for f in result.findings if f.severity != "note" and name == "zlab"], told(result)


def test_every_engine_counts_in_its_own_way(tmp_path: Path) -> None:
    uses = {view.engine: view.uses for view in check_published(export_to(tmp_path / "out")).engines}
    assert uses[VLLM]["num_speculative_tokens"].startswith("4")
    assert uses[SGLANG]["speculative-num-draft-tokens"].startswith("5")
    assert uses[VLLM]["captures"] == "after 2, 5 layers"
    assert uses[ZLAB]["captures"] == "hidden_states[2, 5]"


ZLAB_FAULTS: list[tuple[dict[str, Any], str, set[str]]] = [
    ({"architectures": ["Qwen3DFlashDraftModel"]}, "not dispatched", {VLLM, SGLANG}),
    ({"num_target_layers": None}, "num_target_layers is missing", {ZLAB, SPECFORGE}),
    ({"block_size": None}, "stands in dflash_config only", {SPECFORGE}),
    ({"block_size": 6}, "block_size is 6 at the top and 5", set(USES)),
    ({"dflash_config__mask_token_id": None}, "mask_token_id is missing", set(USES)),
    ({"dflash_config__mask_token_id": 100}, "no row of an embedding of 100", set(USES)),
    ({"dflash_config__mask_token_id": 2}, "is eos_token_id too", set()),
    ({"dflash_config__target_layer_ids": [1, 6]}, "beyond the target's layers 0 to 5", set(USES)),
    ({"dflash_config__target_layer_ids": [4, 4]}, "repeat a layer", set(USES)),
    ({"dflash_config__target_layer_ids": [2, 4]}, "look as if they were counted from 1", set()),
    ({"dflash_config__target_layer_ids": [1, 5]}, "after the final norm", {SPECULATORS}),
    ({"dflash_config__target_layer_ids": [1]}, "shapes do not follow", set(USES)),
    ({"rope_theta": None, "rope_parameters": None}, "written nowhere", set(USES)),
    ({"rope_theta": 5e5}, "500000.0 at the top and 10000.0", set(USES)),
    ({"rope_theta": None}, "transformers 4 take 10000", set()),
    ({"is_causal": None, "dflash_config__causal": None}, "causality is not written", set()),
    ({"layer_types": ["full_attention"]}, "1 entries for 2 layers", set(USES)),
    ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, "V2_MODEL_RUNNER", set()),
    ({"max_position_embeddings": 128}, "drafting ends there", set()),
    ({"hidden_size": 64}, "the target's is 32", set(USES)),
    ({"intermediate_size": 40}, "mlp.down_proj.weight is [32, 48], not [32, 40]", set(USES)),
    ({"num_hidden_layers": 3}, "tensors are missing: layers.2", set(USES)),
    ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "tensors that no DFlash drafter has", set()),
    ({"dtype": "float32"}, "dtype is float32, the file's is bfloat16", set(USES)),
    ({"dtype": None}, "dtype is not written", set()),
    ({"draft_vocab_size": 50}, "there is no tensor d2t", {VLLM, SPECULATORS}),
    ({"dflash_config__input_embedding_scale": 5.5}, "5.5 is not read", {VLLM, SPECULATORS, SPECFORGE}),
    ({"rms_norm_eps": None}, "lacks rms_norm_eps", set(USES)),
    ({"is_neox_style": False}, "rotates halves", set(USES)),
]


@pytest.mark.parametrize(("changes", "words", "broken"), ZLAB_FAULTS, ids=[str(next(iter(f[0]))) for f in ZLAB_FAULTS])
def test_faults_of_the_zlab_format(
    exported: Path, tmp_path: Path, changes: dict[str, Any], words: str, broken: set[str]
) -> None:
    folder = shutil.copytree(exported / "zlab", tmp_path / "out")
    edit_config(folder, **changes)
    result = check_published(folder, make_facts())
    assert words in told(result)
    assert set(USES) - reads(result) == broken, told(result)


SPECULATORS_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"speculators_config__proposal_methods": [{"speculative_tokens": 5}]}, "a block of 5 drafts 4"),
    ({"speculators_config__proposal_methods": None}, "speculative_tokens is missing"),
    ({"aux_hidden_state_layer_ids": [1, 3]}, "look as if they were counted from 0"),
    ({"aux_hidden_state_layer_ids": [0, 3]}, "which is no layer"),
    ({"sliding_window_non_causal": None}, "run causally"),
    ({"speculators_config__verifier__name_or_path": None}, "the target is not named"),
    ({"speculators_config__verifier__name_or_path": "/home/me/target"}, "a folder of one machine"),
    ({"transformer_layer_config__head_dim": None}, "transformer_layer_config lacks head_dim"),
]


@pytest.mark.parametrize(("changes", "words"), SPECULATORS_FAULTS)
def test_faults_of_the_speculators_format(exported: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = shutil.copytree(exported / "speculators", tmp_path / "out")
    edit_config(folder, **changes)
    assert words in told(check_published(folder, make_facts()))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        tensors[name.replace("__", ".")] = value
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


def test_faults_of_the_tensors(tmp_path: Path) -> None:
    folder = export_to(tmp_path / "out")
    rewrite(folder, norm__weight=None, final_norm__weight=torch.ones(32, dtype=torch.bfloat16))
    result = check_published(folder)
    assert "names that engines do not know: final_norm.weight" in told(result) and not reads(result)
    rewrite(folder, final_norm__weight=torch.ones(32, dtype=torch.float32))
    assert "different types" in told(check_published(folder))
    table = torch.zeros(100, 32, dtype=torch.bfloat16)
    rewrite(folder, final_norm__weight=None, norm__weight=torch.ones(32).bfloat16(), embed_tokens__weight=table)
    result = check_published(folder)
    assert "tables of its own" in told(result) and VLLM in reads(result)
    rewrite(folder, mask_hidden=torch.zeros(32).bfloat16())
    assert VLLM not in reads(check_published(folder))


def test_gemma_like_targets_say_who_can_serve_them(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"embedding_scale": 5.5, "logit_softcap": 30.0}
    result = check_published(export_to(tmp_path / "out", **facts), make_facts(**facts))
    assert reads(result) == {ZLAB, SGLANG}
    gemma = check_published(tmp_path / "out", make_facts(model_type="gemma3_text", **facts))
    assert reads(gemma) == {ZLAB, SGLANG, SPECFORGE}
    assert result.sound


def test_the_command_judges_without_a_recipe(tmp_path: Path, run: Runner) -> None:
    folder = export_to(tmp_path / "out")
    done = run("export", "--check", folder)
    assert done.code == 0, done.err
    assert "vLLM: reads it" in done.out and "4, on the command line" in done.out
    edit_config(folder, dtype="float16")
    done = run("export", "--check", folder, "--json")
    assert done.code == 1
    assert json.loads(done.out)["findings"][0]["severity"] == "error"
    done = run("export", "--check", tmp_path / "none")
    assert done.code == 2 and "there is no" in done.err
    assert run("export").code == 2
