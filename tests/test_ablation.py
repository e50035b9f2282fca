"""Variants of a recipe: what each run does, what is kept of a call that ends early, and what the table says."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
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
from scripts.ablation import Ablation, Line, choose, gain, parse_options, table
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
    assert all(list(own) == ["q20", "q21", "q22"] for own in found["prompts"].values())
    assert (tmp_path / "drafter" / "model.safetensors").is_file()
    plan = make_plan(load_recipe(recipe, [f"run.dir={tmp_path / 'run'}"]), MACHINE)
    bench = (recipe.parent / "sums.jsonl",)
    request = ValidationRequest(bench=bench, choice=Choice(20, 3, 1), max_new_tokens=8, acceptance_only=True)
    assert run_validation(plan, request).sources[0].score == found["scores"]["sums"]


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


class Fake:
    """A variant that is done after a few looks."""

    def __init__(self, variant: Variant, found: Line, looks: int, log: list[str]) -> None:
        self.variant = variant
        self._found, self._looks, self._log = found, looks, log
        log.append(f"start {variant.name}")

    def finish(self) -> Line | None:
        self._looks -= 1
        return None if self._looks > 0 else self._found

    def end(self) -> None:
        self._log.append(f"end {self.variant.name}")


def line_of(value: float) -> Line:
    prompts = {"sums": {"a": value, "b": value + 1.0, "c": None}, "talk": {"a": value, "b": value}}
    scores = {"sums": value + 0.5, "talk": value}
    return {
        "steps": 3,
        "train s": 1.0,
        "epochs": 0.5,
        "loss": 2.0,
        "scores": scores,
        "prompts": prompts,
        "seconds": 0.0,
    }


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Ablation, list[str]]]:
    monkeypatch.setattr(ablation, "LOOK_S", 0.0)
    log: list[str] = []

    def make(*words: str, looks: int = 2, failing: tuple[str, ...] = ()) -> tuple[Ablation, list[str]]:
        given = ["recipe.yaml", "--bench", "b.jsonl", "--steps", "3", "--out", str(tmp_path / "lines.jsonl"), *words]

        def launch(variant: Variant) -> Fake:
            found = {"failed": "exit code 1: out of memory", "seconds": 0.0}
            return Fake(variant, found if variant.name in failing else line_of(2.0), looks, log)

        return Ablation(parse_options(given), launch), log

    return make


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
THREE = [Variant(BASE), Variant("a"), Variant("b")]


def test_a_second_call_goes_on_and_tries_what_failed_again(bench: Any) -> None:
    first, log = bench(failing=("a",))
    first.run(THREE[:2])
    assert log == [f"start {BASE}", "start a"] and "a failed: exit code 1: out of memory" in table(first.lines)
    log.clear()
    second, _ = bench()
    second.run(THREE)
    assert log == ["start a", "start b"]
    assert "failed" not in table(second.lines) and len(second.lines) == 4


def test_lines_of_another_budget_are_not_compared(bench: Any) -> None:
    first, log = bench()
    first.run(THREE[:2])
    log.clear()
    for words in (("--set", "train.weight_decay=1"), ("--limit", "7")):
        other, _ = bench(*words)
        assert other.lines == []
    other.run(THREE[:1])
    assert log == [f"start {BASE}"]
    again, _ = bench()
    assert [line["name"] for line in again.lines] == [BASE, "a"]


def test_variants_run_beside_each_other(bench: Any) -> None:
    both, log = bench("--jobs", "2", looks=3)
    running: set[str] = set()
    original = Fake.finish

    def finish(self: Fake) -> Line | None:
        running.add(str(log[-1]))
        return original(self)

    Fake.finish = finish  # type: ignore[method-assign]
    try:
        both.run(THREE)
    finally:
        Fake.finish = original  # type: ignore[method-assign]
    assert running == {"start a", "start b"}  # whenever one was looked at, another had been started


def test_without_time_nothing_is_started(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    late, log = bench("--limit-s", "0")
    late.run(THREE)
    assert log == [] and "no time left for: a" in capsys.readouterr().out


def test_sigterm_keeps_what_is_finished_and_ends_the_rest(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def launch(_options: Any, _folder: Path, variant: Variant) -> Fake:
        if variant.name == VARIANTS[1].name:
            os.kill(os.getpid(), signal.SIGTERM)
        return Fake(variant, line_of(2.0), 1, log)

    monkeypatch.setattr(ablation, "launch", launch)
    out = tmp_path / "lines.jsonl"
    words = ["recipe.yaml", "--bench", "b.jsonl", "--steps", "3", "--out", str(out)]
    assert ablation.main([*words, "--markdown", str(tmp_path / "table.md")]) == 143
    assert [json.loads(text)["name"] for text in out.read_text().splitlines()] == [BASE]
    assert BASE in (tmp_path / "table.md").read_text()
    assert signal.getsignal(signal.SIGTERM) is not ablation.stop


def test_gains_are_of_the_same_prompts() -> None:
    base = line_of(2.0)
    assert gain(line_of(2.5), base) == (0.5, 0.0)
    other = line_of(2.5)
    other["prompts"]["sums"] = {"a": 3.0, "b": 3.0, "z": 9.0}
    found = gain(other, base)
    assert found is not None
    # sums: +1 and 0, variance 0.5; talk: +0.5 twice
    assert found[0] == pytest.approx(0.5) and found[1] == pytest.approx((0.5 / 2) ** 0.5 / 2)
    other["prompts"]["sums"] = {"a": 3.0}
    assert gain(other, base) is None


def test_the_table_has_every_variant_once() -> None:
    lines = [{"name": BASE, **line_of(2.0)}, {"name": "a", "failed": "why"}, {"name": "a", **line_of(3.0)}]
    rows = table(lines).splitlines()
    assert rows[0] == "| variant | steps | train s | epochs | loss | sums | talk | mean | against the recipe |"
    assert rows[2] == f"| {BASE} | 3 | 1.0 | 0.5 | 2.00 | 2.50 | 2.00 | 2.250 |  |"
    assert rows[3] == "| a | 3 | 1.0 | 0.5 | 2.00 | 3.50 | 3.00 | 3.250 | +1.000 ± 0.000 |"
    assert len(rows) == 4 and table([]).count("\n") == 1


def test_what_may_be_asked_for() -> None:
    words = ["recipe.yaml", "--bench", "b.jsonl"]
    for bad in ("", "--seconds 3 --jobs 2", "--steps 3 --skip 19", "--steps 3 --export x", "--steps 3 --seconds 3"):
        with pytest.raises(SystemExit):
            parse_options([*words, *bad.split()])
    final = parse_options([*words, "--seconds", "163", "--final"])
    assert (final.skip, final.limit) == (0, 20) and [v.name for v in choose(final)] == ["final"]
    some = choose(parse_options([*words, "--steps", "3", "--only", "WSD,decay 7"]))
    assert [v.name for v in some] == [BASE, "decay 7", "WSD"]
    with pytest.raises(SystemExit, match="no variant is called nothing"):
        choose(parse_options([*words, "--steps", "3", "--only", "nothing"]))
    same = choose(parse_options([*words, "--steps", "3", "--cost", "same"]))
    assert all(variant.cost == "same" for variant in same) and len(same) > 10


def test_every_variant_fits_one_gpu(tmp_path: Path) -> None:
    path, config = ROOT / "recipes" / "smollm2-dflash.yaml", tmp_path / "config.json"
    config.write_text(json.dumps(SMOLLM2), encoding="utf-8")
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names) and names[0] == BASE
    for variant in VARIANTS:
        settings = [*variant.settings, *ablation_case.FIXED, "train.steps=5", f"target.config={config}"]
        plan = make_plan(load_recipe(path, settings), replace(MACHINE, gpus=(Gpu("H200", "GPU-0", 139 << 30),)))
        assert not plan.lacks and plan.drafter_devices == ("cuda:0",)


def test_a_variant_in_a_process_of_its_own(recipe: Path, tmp_path: Path) -> None:
    words = [str(recipe), "--bench", str(recipe.parent / "sums.jsonl"), "--steps", "2", "--limit", "2"]
    out = tmp_path / "lines.jsonl"
    words += ["--out", str(out), "--max-new-tokens", "6", "--only", BASE]
    assert ablation.main(words) == 0
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["name"] == BASE and line["steps"] == 2 and set(line["prompts"]["sums"]) == {"q20", "q21"}
    assert ablation.main(words) == 0 and len(out.read_text().splitlines()) == 1
