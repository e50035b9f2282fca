"""Variants of a recipe: what each run does, what is kept of a call that ends early, and what the table says."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helixctl.data import anchors
from helixctl.data.sequence import Sequence
from helixctl.data.store import Store
from helixctl.machine import Gpu
from helixctl.models.drafters import _layers, _objective
from helixctl.models.drafters.dflash import model
from helixctl.plan import Plan, make_plan
from helixctl.recipe.load import load_recipe
from helixctl.recipe.schema import ScheduleOptions
from helixctl.training import build
from helixctl.training.build import make_loader
from helixctl.training.conversations import Choice
from helixctl.training.stages import fill_slot
from helixctl.training.validate import ValidationRequest, run_validation
from scripts import ablation, ablation_case
from scripts.ablation import Line, choose, gain, name_of, parse_options, read_lines, table
from scripts.suspects import SUSPECTS, under_suspicion
from scripts.variants import BASE, VARIANTS, Variant
from tests.chats import make_chat_world, prepare_world, write_jsonl
from tests.conftest import ROOT
from tests.training.worlds import MACHINE

PROMPTS = [{"id": f"q{i}", "turns": [f"count to {i}", "again"]} for i in range(24)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    for name in ("sums", "talk"):
        write_jsonl(folder / f"{name}.jsonl", PROMPTS)
    return prepare_world(make_chat_world(folder))


def plan_of(recipe: Path) -> Plan:
    return make_plan(load_recipe(recipe), MACHINE)


# ------------------------------------------------------------------------------------------------------- one variant


def run_case(recipe: Path, capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> Line:
    bench = [word for name in ("sums", "talk") for word in ("--bench", str(recipe.parent / f"{name}.jsonl"))]
    ablation_case.main([str(recipe), "--run-dir", str(folder), *bench, "--max-new-tokens", "8", *words])
    found: Line = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_variant_is_trained_and_scored_as_validate_does(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chosen = ("--skip", "20", "--limit", "3")
    found = run_case(recipe, capsys, tmp_path / "run", "--steps", "3", "--export", str(tmp_path / "drafter"), *chosen)
    assert found["steps"] == 3 and found["train s"] > 0 and found["tokens/s"] > 0 and found["loss"] > 0
    assert list(found["prompts"]) == ["sums", "talk"]
    assert all(len(own) == 3 for own in found["prompts"].values())
    assert (tmp_path / "drafter" / "model.safetensors").is_file()
    plan = make_plan(load_recipe(recipe, [f"run.dir={tmp_path / 'run'}"]), MACHINE)
    bench = (recipe.parent / "sums.jsonl",)
    request = ValidationRequest(bench=bench, choice=Choice(20, 3, 1), max_new_tokens=8, acceptance_only=True)
    result = run_validation(plan, request)
    assert result.sources[0].score == found["scores"]["sums"]
    assert found["prompts"]["sums"] == pytest.approx([prompt.accept_len for prompt in result.prompts], abs=1e-4)
    assert [prompt.id for prompt in result.prompts] == ["q20", "q21", "q22"]


def test_seconds_end_a_run_and_its_schedule(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    class Counted(ablation_case.Clock):
        """A fifth of the time passes with every step."""

        share = property(lambda _self: len(rates) / 5)

        def learning_rate(self, step: int) -> float:
            rates.append(super().learning_rate(step))
            return rates[-1]

    monkeypatch.setattr(ablation_case, "Clock", Counted)
    words = ("--seconds", "3600", "--limit", "1", "--set", "train.warmup_ratio=0", "--set", "train.schedule=linear")
    found = run_case(recipe, capsys, tmp_path / "run", *words)
    assert found["steps"] == 5
    assert rates == pytest.approx([3e-3 * (1 - i / 5) for i in range(5)])


def test_a_clock_follows_the_schedule() -> None:
    options = ScheduleOptions(steps=1, learning_rate=1.0, schedule="linear", warmup_ratio=0.5)
    clock = ablation_case.Clock(10_000.0, options)
    for share, wanted in ((0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 0.5), (1.0, 0.0), (7.0, 0.0)):
        clock._started_at = time.perf_counter() - share * 10_000.0
        assert clock.learning_rate(3) == pytest.approx(wanted, abs=0.05)
    assert clock.share > 1.0
    clock.start()
    assert clock.share < 0.5


def habits() -> tuple[object, ...]:
    """What suspects replace."""
    places = (build, "build_drafter"), (model, "rotary_tables"), (anchors, "eligible_anchors"), (_objective, "choose")
    return tuple(getattr(module, name) for module, name in places)


@pytest.mark.parametrize("name", sorted(SUSPECTS))
def test_every_habit_trains_and_is_gone_afterwards(
    name: str, recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = habits()
    found = run_case(recipe, capsys, tmp_path / "run", "--steps", "2", "--limit", "1", "--suspect", name)
    assert found["steps"] == 2 and 5.0 < found["loss"] < 10.0
    assert habits() == before


def test_habits_do_what_they_say(recipe: Path) -> None:
    plan = plan_of(recipe)
    size = plan.recipe.drafter.block_size
    with under_suspicion("bf16-masters", plan):
        drafter = build.build_drafter(plan, torch.device("cpu"))
        assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    positions = torch.tensor([0, 1, 1000])
    with under_suspicion("bf16-rotary", plan):
        rounded = vars(model)["rotary_tables"](positions, 16, 1e4)
    for one, other in zip(rounded, _layers.rotary_tables(positions, 16, 1e4), strict=True):
        assert torch.allclose(one[:2], other[:2], atol=4e-3) and not torch.allclose(one[2], other[2], atol=0.1)
    with under_suspicion("whole-blocks", plan):
        batches = [make_loader(plan, Store.open(plan.recipe.data.store), Sequence(1, 4)).batch(seq) for seq in range(4)]
    ahead = 0
    for batch in batches:
        used = batch.anchors[0][batch.anchor_valid[0]].numpy()
        documents = batch.document_ids[0].numpy()
        assert used.size and (documents[used] == documents[np.minimum(used + size - 1, documents.size - 1)]).all()
        ahead += int((used + size - 1 >= documents.size).sum())
    assert ahead == 0


def test_documents_of_one_weight(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, sums = plan_of(recipe), dict[str, float]()
    original = _objective.scored_of

    def watched(drafted: Any, chosen: Any, numerator: Any, found: Any) -> Any:
        sums[name] = float(chosen.weights.sum())
        return original(drafted, chosen, numerator, found)

    monkeypatch.setattr(_objective, "scored_of", watched)
    store, device = Store.open(plan.recipe.data.store), torch.device("cpu")
    batch = make_loader(plan, store, Sequence(1, 1)).batch(0)
    targets = build.Targets(plan)
    slot, drafter = build.make_slot_for(plan, device), build.build_drafter(plan, device)
    fill_slot(slot, batch, targets.on("cpu").features(batch))
    for name in ("none", "per-document"):
        with under_suspicion(None if name == "none" else name, plan):
            drafter.loss(slot, targets.shared_on("cpu"))  # type: ignore[operator]
    used = batch.anchors[batch.anchor_valid]
    assert sums["per-document"] == pytest.approx(len(set(batch.document_ids[0][used].tolist())))
    assert sums["none"] > 2 * sums["per-document"]


# ------------------------------------------------------------------------------------------------------- all of them

SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
WORDS = ("recipe.yaml", "--bench", "b.jsonl", "--steps", "3")


def line_of(value: float) -> Line:
    prompts = {"sums": [value, value + 1.0, None], "talk": [value, value]}
    measured = {"steps": 3, "train s": 1.0, "epochs": 0.5, "loss": 2.0, "seconds": 0.0}
    return {**measured, "scores": {"sums": value + 0.5, "talk": value}, "prompts": prompts}


def test_gains_are_of_the_same_prompts() -> None:
    base = line_of(2.0)
    assert gain(line_of(2.5), base) == (0.5, 0.0)
    other = line_of(2.5)
    other["prompts"]["sums"] = [3.0, 3.0, 9.0]
    found = gain(other, base)
    assert found is not None
    # sums: +1 and 0, variance 0.5; talk: +0.5 twice
    assert found[0] == pytest.approx(0.5) and found[1] == pytest.approx((0.5 / 2) ** 0.5 / 2)
    other["prompts"]["sums"] = [3.0]
    assert gain(other, base) is None


def test_the_table_says_what_every_variant_came_to() -> None:
    rows = table({BASE: line_of(2.0), "a": line_of(3.0)}, {"b": "out of memory"}).splitlines()
    assert rows[0] == "| variant | steps | train s | epochs | loss | sums | talk | mean | against the recipe |"
    assert rows[2] == f"| {BASE} | 3 | 1.0 | 0.5 | 2.00 | 2.50 | 2.00 | 2.250 |  |"
    assert rows[3] == "| a | 3 | 1.0 | 0.5 | 2.00 | 3.50 | 3.00 | 3.250 | +1.000 ± 0.000 |"
    assert rows[4:] == ["", "b failed: out of memory"] and table({}, {}).count("\n") == 1


def test_only_lines_of_the_same_budget_prompts_and_settings_are_read(tmp_path: Path) -> None:
    out, variants = tmp_path / "lines.jsonl", [Variant(BASE), Variant("a"), Variant("b")]
    options = parse_options([*WORDS, "--out", str(out)])
    lines = [
        {"name": name_of(variants[0], options), "exit_code": 0, "output": "noise\n" + json.dumps(line_of(2.0)) + "\n"},
        {"name": name_of(variants[1], options), "exit_code": 1, "output": "it failed\n"},
        {"name": name_of(variants[2], options), "exit_code": 1, "output": "once"},
        {"name": name_of(variants[2], options), "exit_code": 0, "output": json.dumps(line_of(3.0))},
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured, failed = read_lines(options, variants)
    assert measured == {BASE: line_of(2.0), "b": line_of(3.0)} and failed == {"a": "it failed"}
    for others in ("--set train.weight_decay=1", "--limit 7", "--skip 30", "--max-new-tokens 5", "--bench c.jsonl"):
        assert read_lines(parse_options([*WORDS, *others.split(), "--out", str(out)]), variants) == ({}, {})
    seconds = parse_options(["recipe.yaml", "--bench", "b.jsonl", "--seconds", "3", "--out", str(out)])
    assert read_lines(seconds, variants) == ({}, {})


def test_what_may_be_asked_for() -> None:
    words = ["recipe.yaml", "--bench", "b.jsonl"]
    for bad in ("", "--seconds 3 --jobs 2", "--steps 3 --skip 19", "--steps 3 --export x", "--steps 3 --seconds 3"):
        with pytest.raises(SystemExit):
            parse_options([*words, *bad.split()])
    final = parse_options([*words, "--seconds", "163", "--final"])
    assert (final.skip, final.limit) == (0, 20) and [v.name for v in choose(final)] == ["final"]
    some = choose(parse_options([*WORDS, "--only", "WSD,decay 7"]))
    assert [v.name for v in some] == [BASE, "WSD", "decay 7"]
    with pytest.raises(SystemExit, match="no variant is called nothing"):
        choose(parse_options([*WORDS, "--only", "nothing"]))
    same = choose(parse_options([*WORDS, "--cost", "same"]))
    assert all(variant.cost == "same" for variant in same) and len(same) > 10


def test_every_variant_fits_one_gpu(tmp_path: Path) -> None:
    path, config = ROOT / "recipes" / "smollm2-dflash.yaml", tmp_path / "config.json"
    config.write_text(json.dumps(SMOLLM2), encoding="utf-8")
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names) and names[0] == BASE
    assert not any("," in name for name in names)  # --only has commas between them
    for variant in VARIANTS:
        settings = [*variant.settings, *ablation_case.FIXED, "train.steps=5", f"target.config={config}"]
        plan = make_plan(load_recipe(path, settings), replace(MACHINE, gpus=(Gpu("H200", "GPU-0", 139 << 30),)))
        assert not plan.lacks and plan.drafter_devices == ("cuda:0",)


def test_a_call_goes_on_where_another_ended_and_says_what_failed(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ablation, "VARIANTS", (Variant(BASE), Variant("broken", ("train.learning_rate=-1",))))
    out, markdown = tmp_path / "lines.jsonl", tmp_path / "table.md"
    words = [str(recipe), "--bench", str(recipe.parent / "sums.jsonl"), "--steps", "2", "--limit", "2", "--jobs", "2"]
    words += ["--out", str(out), "--max-new-tokens", "6", "--markdown", str(markdown)]
    assert ablation.main([*words, "--limit-s", "0"]) == 1 and not out.exists()
    assert ablation.main(words) == 1
    codes = {line["name"].split(" | ")[0]: line["exit_code"] for line in map(json.loads, out.read_text().splitlines())}
    assert codes == {BASE: 0, "broken": 1}
    text = markdown.read_text()
    assert f"| {BASE} | 2 |" in text and "broken failed: " in text and "train.learning_rate" in text
    assert text.strip() in capsys.readouterr().out
    assert ablation.main([*words, "--only", BASE]) == 0 and len(out.read_text().splitlines()) == 2
