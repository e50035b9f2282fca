"""What compiling costs a run: a cache of compiled code for the process, and an account of every part that compiles.

Compiled code is looked for before anything is loaded, and counted after the warm-up: torch's own counters say what was
found. A cache that does not fit is named and not used.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
import torch

from helixctl.checkpoint.compiled import BUNDLE, FOLDER, SUFFIX, CacheFile, read_cache, unpack_cache
from helixctl.errors import CheckpointError
from helixctl.lm_plan import AnyPlan
from helixctl.models.private import interpreted
from helixctl.training.compile_key import Key, compiled_devices, differences, make_key

logger = logging.getLogger(__name__)

CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_PREFIX = "helixctl-compile-"
_IMPORTED_FIRST = ("torch._dynamo.utils", "torch._functorch.aot_autograd", "torch._inductor.compile_fx")
"""Modules that stay half-made when two threads import them at once."""
_METRICS_KEPT = 4096
"""Compilations that torch remembers; its own default is 64."""
_COUNTED = {
    "autograd_hits": ("aot_autograd", "autograd_cache_hit"),
    "autograd_misses": ("aot_autograd", "autograd_cache_miss"),
    "autograd_bypasses": ("aot_autograd", "autograd_cache_bypass"),
    "inductor_hits": ("inductor", "fxgraph_cache_hit"),
    "inductor_misses": ("inductor", "fxgraph_cache_miss"),
    "inductor_bypasses": ("inductor", "fxgraph_cache_bypass"),
}


@dataclass(frozen=True)
class CacheUse:
    """What became of the cache of compiled code."""

    state: Literal["off", "hit", "miss"]
    """off: nothing is compiled; hit: a cache fits and is used; miss: there is none that fits."""
    path: str | None = None
    """The file that is used, or the one that nearly fits."""
    reasons: tuple[str, ...] = ()
    """Why it is not used."""

    def __str__(self) -> str:
        if self.state == "off":
            return "nothing is compiled"
        if self.state == "hit":
            return f"hit, {self.path}"
        return f"miss, {self.path}: {'; '.join(self.reasons)}" if self.path else f"miss, {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class Compiled:
    """What the compilation of one component came to."""

    seconds: float
    """Of its warm-up: compilation, first runs, captures of CUDA graphs; loading weights is not among them."""
    graphs: int
    graph_breaks: int
    recompiles: int
    counters: dict[str, int]
    """Hits, misses and bypasses of torch's caches."""

    @property
    def misses(self) -> int:
        """Graphs that were compiled although a cache could have held them."""
        return sum(n for name, n in self.counters.items() if not name.endswith("_hits"))

    @property
    def hits(self) -> int:
        """Graphs that came from a cache."""
        return sum(n for name, n in self.counters.items() if name.endswith("_hits"))

    def __str__(self) -> str:
        return (
            f"{self.seconds:.1f} s, {self.graphs} graphs, {self.graph_breaks} graph breaks, {self.recompiles} "
            f"recompiles, cache: {self.hits} hits, {self.misses} misses"
        )


@dataclass
class CompileLog:
    """Filled by the stages during their set-ups, which run one at a time."""

    cache: CacheUse = CacheUse("off")
    components: dict[str, Compiled] = field(default_factory=dict)

    @contextmanager
    def account(self, component: str) -> Iterator[None]:
        """Count what the block compiles; nothing is kept of a block that compiles nothing."""
        before, began_at = _count(), time.perf_counter()
        yield
        counted, seconds = _count(), time.perf_counter() - began_at
        counted.subtract(before)
        if counted["graphs"] or any(counted.values()):
            self.components[component] = Compiled(
                seconds=seconds,
                graphs=counted["graphs"],
                graph_breaks=counted["graph_breaks"],
                recompiles=counted["recompiles"],
                counters={name: counted[name] for name in _COUNTED},
            )

    def say(self) -> None:
        """One line in the log per component, behind the cache's."""
        if self.components:
            logger.info("compile cache: %s", self.cache)
            for name, compiled in self.components.items():
                logger.info("compiled %s: %s", name, compiled)


def _count() -> Counter[str]:
    from torch._dynamo.utils import counters, get_compilation_metrics

    found: Counter[str] = Counter({name: counters[group][entry] for name, (group, entry) in _COUNTED.items()})
    metrics = [m for m in get_compilation_metrics() if m.is_forward]
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["graph_breaks"] = sum(counters["graph_break"].values())
    found["recompiles"] = sum(_is_recompile(str(m.compile_id)) for m in metrics)
    return found


def _is_recompile(compile_id: str) -> bool:
    """Ids are frame/attempt, with a restart behind an underscore: 3/0 is the first compilation of frame 3."""
    attempt = compile_id.rpartition("/")[2].partition("_")[0]
    return attempt.isdecimal() and int(attempt) > 0


@contextmanager
def compiler(plan: AnyPlan, *, use_cache: bool = True) -> Iterator[CompileLog]:
    """Get the process's compiler ready for ``plan``: its cache, its mode, its account; undone at the end.

    Call it on the main thread before any other starts and before anything is compiled.
    """
    if not compiled_devices(plan):
        with interpreted() if plan.recipe.compile.mode == "off" else nullcontext():
            yield CompileLog()
        return
    for name in _IMPORTED_FIRST:
        importlib.import_module(name)
    torch._dynamo.utils.set_compilation_metrics_limit(_METRICS_KEPT)
    if not use_cache:
        yield CompileLog()
        return
    use, cache = find_cache(plan.recipe.compile.cache, make_key(plan))
    if cache is None:
        yield CompileLog(use)
        return
    with _unpacked(cache) as (folder, torn):
        if torn is not None:
            use = CacheUse("miss", use.path, (torn,))
        elif (bundle := (folder / BUNDLE).read_bytes()) != b"":
            torch.compiler.load_cache_artifacts(bundle)
        yield CompileLog(use)


def cache_folder() -> Path:
    """Where caches are kept unless a recipe names a file."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "helixctl" / "compile"


def find_cache(given: Path | None, key: Key) -> tuple[CacheUse, CacheFile | None]:
    """The cache that fits ``key``: the file ``given``, else the newest in the folder; else what is wrong with it."""
    paths = [given] if given is not None else sorted(cache_folder().glob(f"*{SUFFIX}"), key=_age)
    misses: list[tuple[float, CacheUse]] = []
    for path in paths:
        try:
            cache = read_cache(path)
        except CheckpointError as error:
            misses.append((math.inf, CacheUse("miss", str(path), (error.message,))))
            continue
        found = differences(cache.key, key)
        if not found:
            return CacheUse("hit", str(path)), cache
        misses.append((len(found), CacheUse("miss", str(path), tuple(found))))
    nowhere = CacheUse("miss", None, (f"there is none in {cache_folder()}",))
    return min(misses, key=lambda miss: miss[0], default=(0, nowhere))[1], None


def _age(path: Path) -> float:
    return -path.stat().st_mtime


@contextmanager
def _unpacked(cache: CacheFile) -> Iterator[tuple[Path, str | None]]:
    """A folder of this process alone with the checked content, where the compiler looks; and what is wrong, if so.

    Every process unpacks for itself: what another one adds, or leaves half-written, is nobody else's.
    """
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
    torn = None
    try:
        try:
            unpack_cache(cache, folder)
            (folder / FOLDER).mkdir(exist_ok=True)
            point_at(folder / FOLDER)
        except CheckpointError as error:
            torn = error.message
            logger.warning("the compile cache is not used: %s", torn)
        yield folder, torn
    finally:
        _restore(before)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers() -> None:
    """Folders of this user's processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays


def point_at(folder: Path) -> None:
    """Let torch's compiler, and Triton below it, keep everything in ``folder``."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ.pop("TRITON_CACHE_DIR", None)


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
