"""Compiles what a run would compile, in a fresh process; packs what came of it; shows in another one that it is found.

Both processes set the pipeline up as ``train`` does, stage by stage, each in its own thread, up to the gate. Nothing is
trained and no run directory is touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixctl.checkpoint.compiled import read_cache
from helixctl.errors import HelixError, UsageError
from helixctl.lm_plan import AnyPlan
from helixctl.recipe.load import dump_recipe
from helixctl.training.compile_key import compiled_devices, make_key
from helixctl.training.compiling import CACHE_VARIABLES, CacheUse, Compiled, find_cache

CHILD = "helixctl.warmup.child"
"""The module that both processes run."""


class WarmUpFailed(HelixError):
    """A process that compiled ended with an error."""


@dataclass(frozen=True)
class WarmUp:
    """What `warmup-compile` did."""

    path: str
    num_bytes: int
    devices: tuple[str, ...]
    cold: dict[str, Compiled]
    """By component, with nothing compiled before."""
    warm: dict[str, Compiled]
    """By component, in a fresh process with this cache."""
    unpack_seconds: float
    """To check and unpack the cache."""

    @property
    def ratio(self) -> float:
        """Seconds with the cache, unpacking included, over seconds without."""
        return (self.unpack_seconds + _seconds(self.warm)) / max(_seconds(self.cold), 1e-9)

    @property
    def misses(self) -> int:
        """Graphs that the fresh process compiled all the same."""
        return sum(compiled.misses for compiled in self.warm.values())


def warm_up(
    plan: AnyPlan,
    output: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    child: str = CHILD,
) -> WarmUp:
    """Compile every shape of ``plan`` on its devices, and keep what came of it in ``output``.

    Without ``output`` it goes where the recipe's `compile.cache` says, else where `train` looks by itself.
    ``on_progress`` gets the processes done, and both; ``child`` is the module that they run.

    Raises:
        UsageError: nothing is compiled in this plan, or several processes were started.
        WarmUpFailed: one of the two processes failed.
        CheckpointError: the file cannot be written.
    """
    _refuse(plan)
    with tempfile.TemporaryDirectory(prefix="helixctl-warmup-") as name:
        folder = Path(name)
        recipe = folder / "recipe.yaml"
        recipe.write_text(dump_recipe(plan.recipe), encoding="utf-8")
        (folder / "cold").mkdir()
        fresh = {"recipe": str(recipe), "fresh": str(folder / "cold"), "output": _text(output)}
        cold = _in_child(child, folder, fresh)
        on_progress(1, 2)
        warm = _in_child(child, folder, {"recipe": str(recipe), "use": cold["path"]})
        on_progress(2, 2)
    return WarmUp(
        path=cold["path"],
        num_bytes=Path(cold["path"]).stat().st_size,
        devices=compiled_devices(plan),
        cold=_components(cold),
        warm=_components(warm),
        unpack_seconds=warm["unpack_seconds"],
    )


def check_cache(plan: AnyPlan, path: Path | None = None) -> CacheUse:
    """Whether `train` would find compiled code for ``plan``, and what stands in the way.

    Raises:
        UsageError: several processes were started.
    """
    if not compiled_devices(plan):
        return CacheUse("off")
    if path is not None:
        read_cache(path)  # a file that was named and cannot be read is an error
    return find_cache(path or plan.recipe.compile.cache, make_key(plan))[0]


def _refuse(plan: AnyPlan) -> None:
    if plan.world.size > 1:
        raise UsageError(
            "warmup-compile is one process",
            fix="run it without torchrun; name all GPUs of the host in pipeline.targets and pipeline.drafters",
        )
    if not compiled_devices(plan):
        raise UsageError(
            "nothing is compiled in this plan",
            fix="use a GPU, or set compile.mode: on to compile on a CPU, too",
        )


def _in_child(child: str, folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Run one process; what it logs goes to this one's stderr."""
    request_path, answer_path = folder / "request.json", folder / "answer.json"
    request_path.write_text(json.dumps(request), encoding="utf-8")
    answer_path.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in CACHE_VARIABLES}
    environment["TORCHINDUCTOR_CACHE_DIR"] = request.get("fresh") or str(folder / "unused")
    words = [sys.executable, "-m", child, str(request_path), str(answer_path)]
    code = subprocess.run(words, env=environment, stdout=sys.stderr, check=False).returncode
    if not answer_path.exists():
        raise WarmUpFailed(f"the process that compiles ended with code {code}", fix="its own message stands above")
    answer: dict[str, Any] = json.loads(answer_path.read_text(encoding="utf-8"))
    if "error" in answer:
        raise WarmUpFailed(answer["error"], fix=answer["fix"])
    return answer


def _components(answer: dict[str, Any]) -> dict[str, Compiled]:
    return {name: Compiled(**values) for name, values in answer["components"].items()}


def _seconds(components: dict[str, Compiled]) -> float:
    return sum(compiled.seconds for compiled in components.values())


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
