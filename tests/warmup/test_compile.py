"""`warmup-compile`: two processes, one cache; what a check says; stages that are set up and no further."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from helixctl.checkpoint.compiled import write_cache
from helixctl.errors import CheckpointError, HelixError, UsageError
from helixctl.machine import World, read_machine
from helixctl.plan import Plan, make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training.compile_key import make_key
from helixctl.training.compiling import CacheUse, Compiled, CompileLog
from helixctl.warmup import child, compile
from helixctl.warmup.compile import WarmUpFailed, check_cache, warm_up
from tests.training.worlds import MACHINE, make_world, make_world_plan

NO_COUNTS = {"autograd_hits": 0, "autograd_misses": 0, "inductor_hits": 0, "inductor_misses": 0}
COLD = Compiled(40.0, 3, 0, 1, NO_COUNTS | {"autograd_misses": 1, "inductor_misses": 2})
WARM = Compiled(3.0, 3, 0, 1, NO_COUNTS | {"autograd_hits": 1, "inductor_hits": 2})


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def plan_of(recipe: Path, *overrides: str) -> Plan:
    return make_world_plan(recipe, "compile.mode=on", *overrides)


class Processes:
    """In place of the two processes: writes what they would, and remembers what it was asked."""

    def __init__(self, cache: Path, key: dict[str, Any], error: str | None = None) -> None:
        self.cache, self.key, self.error = cache, key, error
        self.requests: list[dict[str, Any]] = []
        self.environments: list[dict[str, str]] = []

    def run(self, words: list[str], *, env: dict[str, str], **_: Any) -> Any:
        request = json.loads(Path(words[-2]).read_text())
        self.requests.append(request)
        self.environments.append(env)
        answer: dict[str, Any] = {"components": {"drafter-0": asdict(COLD if "fresh" in request else WARM)}}
        if "fresh" in request:
            write_cache(self.cache, self.key, Path(request["fresh"]), b"")
            answer["path"] = str(self.cache)
        answer["unpack_seconds"] = 1.0
        if self.error != "killed":
            Path(words[-1]).write_text(json.dumps({"error": self.error, "fix": "mend it"} if self.error else answer))
        return subprocess.CompletedProcess(words, -9 if self.error == "killed" else 0)


@pytest.fixture
def processes(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    fake = Processes(tmp_path / "cache.bin", make_key(plan_of(recipe)))
    monkeypatch.setattr(compile.subprocess, "run", fake.run)  # type: ignore[attr-defined]  # a module of ours imports it
    return fake


def test_cold_then_warm_and_neither_sees_an_older_cache(recipe: Path, processes: Processes, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/user")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/user")
    done: list[tuple[int, int]] = []
    result = warm_up(plan_of(recipe), processes.cache, lambda *progress: done.append(progress))
    assert (result.cold, result.warm) == ({"drafter-0": COLD}, {"drafter-0": WARM})
    assert (result.path, result.devices) == (str(processes.cache), ("cpu",))
    assert result.ratio == pytest.approx((1.0 + 3.0) / 40.0)
    assert result.misses == 0
    assert done == [(1, 2), (2, 2)]
    assert processes.requests[0]["output"] == processes.requests[1]["use"] == str(processes.cache)
    folders = {environment["TORCHINDUCTOR_CACHE_DIR"] for environment in processes.environments}
    assert len(folders) == 2 and "/of/the/user" not in folders
    assert not any("TRITON_CACHE_DIR" in environment for environment in processes.environments)


@pytest.mark.parametrize(("error", "words"), [("out of memory", "out of memory"), ("killed", "ended with code -9")])
def test_a_process_that_fails_is_told(recipe: Path, processes: Processes, error: str, words: str) -> None:
    processes.error = error
    with pytest.raises(WarmUpFailed, match=words):
        warm_up(plan_of(recipe))


def test_plans_that_compile_nothing_are_refused(recipe: Path) -> None:
    with pytest.raises(UsageError, match="nothing is compiled"):
        warm_up(make_world_plan(recipe))


def test_it_is_one_process(recipe: Path) -> None:
    from dataclasses import replace

    from helixctl.plan import make_plan
    from helixctl.recipe.load import load_recipe

    plan = make_plan(load_recipe(recipe), replace(MACHINE, world=World(2, 0, 2, 0)))
    with pytest.raises(UsageError, match="one process"):
        warm_up(plan)


def test_a_check_says_hit_or_what_differs(recipe: Path, processes: Processes) -> None:
    assert check_cache(make_world_plan(recipe)).state == "off"
    assert check_cache(plan_of(recipe)).state == "miss"
    warm_up(plan_of(recipe), processes.cache)
    assert check_cache(plan_of(recipe), processes.cache) == CacheUse("hit", str(processes.cache))
    assert check_cache(plan_of(recipe, f"compile.cache={processes.cache}")).state == "hit"
    missed = check_cache(plan_of(recipe, "data.seq_len=16"), processes.cache)
    assert missed == CacheUse("miss", str(processes.cache), ("data.seq_len is 16 here, 32 in the cache",))
    with pytest.raises(CheckpointError):
        check_cache(plan_of(recipe), processes.cache.with_name("none"))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("with_data", [True, False])
def test_stages_are_set_up_and_nothing_is_trained(recipe: Path, tmp_path: Path, with_data: bool) -> None:
    data = [] if with_data else [f"data.store={tmp_path / 'none'}", "train.epochs=1", "train.steps=null"]
    plan = plan_of(recipe, f"run.dir={tmp_path / 'run'}", *data)
    torch.compiler.set_stance("force_eager")
    try:
        child.set_up_only(plan, CompileLog())
    finally:
        torch.compiler.set_stance("default")
    assert not (tmp_path / "run").exists()


def test_an_error_is_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_request: dict[str, Any]) -> dict[str, Any]:
        raise HelixError("no such target", fix="name another")

    (tmp_path / "request").write_text('{"use": "x"}')
    monkeypatch.setattr(child, "_use_cache", fail)
    monkeypatch.setattr(child.sys, "argv", ["child", str(tmp_path / "request"), str(tmp_path / "answer")])  # type: ignore[attr-defined]
    child.main()
    assert json.loads((tmp_path / "answer").read_text()) == {"error": "no such target", "fix": "name another"}


@pytest.mark.gpu
def test_a_fresh_process_finds_all_of_it_on_a_gpu(recipe: Path, tmp_path: Path) -> None:
    overrides = ["drafter.head_dim=16", "drafter.num_anchors=16", "data.seq_len=128"]
    devices = ("pipeline.targets=['cuda:0']", "pipeline.drafters=['cuda:0']")
    plan = make_plan(load_recipe(recipe, (*devices, *overrides)), read_machine())
    result = warm_up(plan, tmp_path / "cache.bin")
    assert set(result.cold) == {"target-0", "drafter-0"}
    assert result.misses == 0
    assert sum(compiled.hits for compiled in result.warm.values()) > 0
    assert result.ratio < 0.5
