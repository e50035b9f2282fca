"""Keys of compiled code, the choice among caches, and the account of what was compiled."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from helixctl.checkpoint.compiled import read_cache, write_cache
from helixctl.plan import Plan
from helixctl.training import compiling
from helixctl.training.compile_key import Key, compiled_devices, differences, make_key
from helixctl.training.compiling import CACHE_VARIABLES, CompileLog, compiler, find_cache
from tests.training.worlds import make_world, make_world_plan


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `train` looks by itself; nothing is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "helixctl" / "compile"


def make_cache(path: Path, key: Key) -> Path:
    """A cache that holds one file."""
    folder = path.parent / f"{path.stem}-content"
    folder.mkdir(parents=True)
    (folder / "code").write_text("compiled")
    write_cache(path, key, folder, b"")
    return path


def plan_of(recipe: Path, *overrides: str) -> Plan:
    return make_world_plan(recipe, "compile.mode=on", *overrides)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("train.micro_batch_rows=2", "train.micro_batch_rows"),
        ("data.seq_len=16", "data.seq_len"),
        ("data.packing=false", "data.packing"),
        ("drafter.num_anchors=5", "drafter.num_anchors"),
        ("drafter.block_size=5", "drafter.block_size"),
        ("drafter.loss.decay_gamma=3.0", "drafter.loss.decay_gamma"),
        ("drafter.target_layer_ids=[0, 1]", "taps"),
        ("target.dtype=bfloat16", "target.dtype"),
        ("target.quantization=fp8", "target.quantization"),
        ("run.deterministic=true", "run.deterministic"),
        ("pipeline.threads=7", "CPU threads"),
        ("compile.graphs=off", "compile.graphs"),
    ],
)
def test_what_changes_code_changes_the_key(recipe: Path, override: str, name: str) -> None:
    found = differences(make_key(plan_of(recipe)), make_key(plan_of(recipe, override)))
    assert any(sentence.startswith(f"{name} is ") for sentence in found), found


@pytest.mark.parametrize(
    "override", ["train.learning_rate=0.1", "run.seed=9", "train.steps=9", "run.dir=elsewhere", "compile.cache=x"]
)
def test_what_changes_no_code_does_not(recipe: Path, override: str) -> None:
    assert make_key(plan_of(recipe)) == make_key(plan_of(recipe, override))


def test_variables_of_the_compiler_are_in_the_key(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_key(plan_of(recipe))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    assert make_key(plan_of(recipe)) == before
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert differences(before, make_key(plan_of(recipe))) == [
        "TORCHINDUCTOR_MAX_AUTOTUNE is 1 here, not set in the cache"
    ]


def test_a_cache_of_more_devices_fits_a_part_of_them() -> None:
    cached = {"drafter on cuda:0": "H200", "drafter on cuda:1": "H200", "torch": "2.13"}
    assert differences(cached, {"drafter on cuda:1": "H200", "torch": "2.13"}) == []
    assert differences(cached, {"drafter on cuda:2": "H200", "torch": "2.13"}) == [
        "nothing was compiled for the drafter on cuda:2"
    ]
    assert differences(cached, {"drafter on cuda:0": "A100", "torch": "2.13"}) == [
        "drafter on cuda:0 is A100 here, H200 in the cache"
    ]


@pytest.mark.parametrize(("mode", "devices"), [("auto", ()), ("off", ()), ("on", ("cpu",))])
def test_a_cpu_compiles_only_when_told(recipe: Path, mode: str, devices: tuple[str, ...]) -> None:
    assert compiled_devices(make_world_plan(recipe, f"compile.mode={mode}")) == devices


def test_the_cache_that_fits_is_found_and_the_nearest_is_named(recipe: Path, caches: Path) -> None:
    wanted = make_key(plan_of(recipe))
    assert find_cache(None, wanted)[0].state == "miss"
    make_cache(caches / "far.bin", {"torch": "1.0"})
    near = make_cache(caches / "near.bin", wanted | {"data.seq_len": 99})
    (caches / "torn.bin").write_bytes(b"?")
    use, _ = find_cache(None, wanted)
    assert (use.state, use.path) == ("miss", str(near))
    assert use.reasons == ("data.seq_len is 32 here, 99 in the cache",)
    right = make_cache(caches / "right.bin", wanted)
    use, cache = find_cache(None, wanted)
    assert (use.state, use.path) == ("hit", str(right))
    assert cache == read_cache(right)
    assert find_cache(near, wanted)[0].state == "miss"


def test_the_compiler_looks_into_the_cache_and_nothing_stays(recipe: Path, caches: Path) -> None:
    plan = plan_of(recipe)
    path = make_cache(caches / "right.bin", make_key(plan))
    with compiler(plan) as log:
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert (folder / "code").read_text() == "compiled"
        assert (log.cache.state, log.cache.path) == ("hit", str(path))
    assert not folder.exists()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_torn_cache_is_told_and_not_used(recipe: Path, caches: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of(recipe)
    path = make_cache(caches / "right.bin", make_key(plan))
    path.write_bytes(path.read_bytes()[:-1])
    with compiler(plan) as log:
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
        assert log.cache.state == "miss"
    assert "SHA-256" in caplog.text


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    dead, own = (tmp_path / f"{compiling._PREFIX}{pid}-abc" for pid in (2**30, os.getpid()))
    dead.mkdir()
    own.mkdir()
    compiling._remove_leftovers()
    assert (dead.exists(), own.exists()) == (False, True)


def test_eager_means_eager_everywhere(recipe: Path) -> None:
    calls = []

    def compile_nothing(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        calls.append(graph)
        return graph

    function = torch.compile(lambda x: x + 1, backend=compile_nothing)
    with compiler(make_world_plan(recipe, "compile.mode=off")):
        function(torch.ones(2))
    assert not calls
    function(torch.ones(2))
    assert len(calls) == 1


def test_graphs_breaks_and_recompiles_are_counted_by_component() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    log = CompileLog()
    with log.account("plain"):
        compiled = torch.compile(plain, backend="eager", dynamic=False)
        compiled(torch.ones(2))
        compiled(torch.ones(3))
    with log.account("broken"):
        torch.compile(broken, backend="eager", dynamic=False)(torch.ones(2))
    with log.account("nothing"):
        plain(torch.ones(2))
    found = {name: (c.graphs, c.graph_breaks, c.recompiles) for name, c in log.components.items()}
    assert found == {"plain": (2, 0, 1), "broken": (2, 1, 0)}
