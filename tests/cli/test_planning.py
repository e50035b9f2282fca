"""`plan` and `warmup-compile` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixctl.machine import Machine
from helixctl.training import measure
from helixctl.training.compiling import CacheUse, Compiled
from helixctl.training.measure import Measured
from helixctl.training.placement import Pace, Placement
from helixctl.warmup import compile
from helixctl.warmup.compile import WarmUp
from tests.training.worlds import make_world

TWO = ("cuda:0", "cuda:1")
TOGETHER = Placement(TWO, TWO, 24_800.0, "both")
APART = Placement(TWO[:1], TWO[1:], 20_300.0, "drafter", fits=False)
PACE = Pace(0.395, 0.6, 12_288.0)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_world(tmp_path_factory.mktemp("world")))


def test_measured_paces_end_in_the_line_that_the_recipe_needs(recipe, run, monkeypatch) -> None:
    found = Measured(PACE, "made up, full", APART, (TOGETHER, APART), TOGETHER)
    monkeypatch.setattr(measure, "measure", lambda plan, machine: found)
    done = run("plan", recipe, "--measure")
    assert done.code == 0, done.err
    assert "395.0 ms, 31,109 tokens/s" in done.out
    assert "about 20,300 tokens/s; limit: drafter" in done.out
    assert "pipeline: {targets: [cuda:0, cuda:1], drafters: [cuda:0, cuda:1]}" in done.out
    assert "about 24,800 tokens/s" in done.out
    assert "too little" in done.out
    told = json.loads(run("plan", recipe, "--measure", "--json").out)
    assert told["measured"]["recommended"]["tokens_per_s"] == 24_800.0
    assert told["memory"]


def test_what_cannot_fit_is_refused_with_its_place_in_the_recipe(recipe, run, monkeypatch) -> None:
    small = Machine(num_cpus=2, total_memory_bytes=100 << 20)
    monkeypatch.setattr("helixctl.machine.read_machine", lambda: small)
    for command in ("plan", "train"):
        done = run(command, recipe, "--set", "train.micro_batch_rows=64")
        assert done.code == 2
        assert "train.pass_rows" in done.err
        assert "cpu needs about" in done.err and "the largest part is" in done.err
    assert "the process itself" in run("plan", recipe, "--set", "train.micro_batch_rows=64").out


@pytest.mark.parametrize(
    ("use", "code", "words"),
    [
        (CacheUse("off"), 0, "nothing is compiled"),
        (CacheUse("hit", "/somewhere/cache.bin"), 0, "/somewhere/cache.bin"),
        (CacheUse("miss", "/x.bin", ("torch is 2.13 here, 2.11 in the cache",)), 1, "torch is 2.13 here"),
    ],
)
def test_a_check_ends_with_what_train_would_find(recipe, run, monkeypatch, use, code, words) -> None:
    monkeypatch.setattr(compile, "check_cache", lambda plan, path: use)
    done = run("warmup-compile", recipe, "--check")
    assert done.code == code
    assert words in done.out
    assert json.loads(run("warmup-compile", recipe, "--check", "--json").out)["state"] == use.state


def test_a_warm_up_shows_what_it_saves(recipe, run, monkeypatch, tmp_path: Path) -> None:
    cold = Compiled(120.0, 5, 1, 3, {"inductor_misses": 8})
    warm = Compiled(6.0, 5, 1, 3, {"inductor_hits": 8})
    made = WarmUp(str(tmp_path / "c.bin"), 2 << 20, ("cuda:0",), {"drafter-0": cold}, {"drafter-0": warm}, 2.0)
    monkeypatch.setattr(compile, "warm_up", lambda plan, output, on_progress: made)
    done = run("warmup-compile", recipe, "--output", str(tmp_path / "c.bin"))
    assert done.code == 0, done.err
    assert "8.0 s, 2.0 of them to check and unpack: 7 % of cold" in done.out
    row = next(line.split() for line in done.out.splitlines() if "drafter-0" in line)
    assert row == ["drafter-0", "120.0", "6.0", "5", "1", "3", "8", "0"]


def test_nothing_to_compile_is_an_error_with_a_fix(recipe, run) -> None:
    done = run("warmup-compile", recipe)
    assert done.code == 2
    assert "compile.mode: on" in done.err


def test_eager_is_a_mode(recipe, run) -> None:
    assert run("train", recipe, "--eager", "--dry-run").code == 0
