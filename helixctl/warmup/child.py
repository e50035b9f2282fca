"""One process that sets a pipeline up to the gate and tells what it compiled; started by ``compile.py``.

Its two arguments are files of JSON: the request, and where the answer goes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from helixctl.checkpoint.compiled import SUFFIX, write_cache
from helixctl.data.store import Store
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.supervisor import Progress
from helixctl.errors import HelixError, StageFailed
from helixctl.lm_plan import AnyPlan, CausalLMPlan, make_any_plan
from helixctl.machine import read_machine
from helixctl.plan import Plan
from helixctl.recipe.load import load_any_recipe
from helixctl.training.build import Targets, build_pipeline
from helixctl.training.compile_key import Key, make_key
from helixctl.training.compiling import CompileLog, cache_folder, compiler
from helixctl.training.lm_build import build_lm_pipeline
from helixctl.training.process import set_up_process
from helixctl.training.state import TrainState
from helixctl.training.wiring import Control, Pipeline, WarmedUp

logger = logging.getLogger(__name__)


def main() -> None:
    """Do what the request says and write the answer, also where that is an error."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        answer = _make_cache(request) if "fresh" in request else _use_cache(request)
    except HelixError as error:
        if isinstance(error, StageFailed) and not isinstance(error.__cause__, HelixError):
            logger.exception("the warm-up failed", exc_info=error.__cause__)
        answer = {"error": error.message, "fix": error.fix}
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


def _make_cache(request: dict[str, Any]) -> dict[str, Any]:
    """Compile everything into the fresh folder of the request, and pack it."""
    plan = _plan(request)
    key = make_key(plan)
    with compiler(plan, use_cache=False) as log:
        set_up_only(plan, log)
        saved = torch.compiler.save_cache_artifacts()
    path = Path(request["output"]) if request["output"] else _default_path(plan, key)
    written = write_cache(path, key, Path(request["fresh"]), saved[0] if saved else b"")
    return {"path": str(written.path), **_account(log)}


def _use_cache(request: dict[str, Any]) -> dict[str, Any]:
    """Compile with the cache of the request."""
    plan = _plan(request)
    began_at = time.perf_counter()
    with compiler(plan) as log:
        unpack_seconds = time.perf_counter() - began_at
        if log.cache.state != "hit":
            raise HelixError(f"the cache that was just made does not fit: {log.cache}", fix="run the command again")
        set_up_only(plan, log)
    return {"unpack_seconds": unpack_seconds, **_account(log)}


def _plan(request: dict[str, Any]) -> AnyPlan:
    cache = [f"compile.cache={json.dumps(request['use'])}"] if "use" in request else []
    plan = make_any_plan(load_any_recipe(Path(request["recipe"]), cache), read_machine())
    set_up_process(plan)
    return plan


def set_up_only(plan: AnyPlan, log: CompileLog) -> None:
    """The stages of a run, each in its thread, until all are ready; then they end."""
    with InterruptFlag() as interrupt:
        control = Control(interrupt, Progress(), compiled=log, only_warm_up=True)
        pipeline = _build_lm(plan, control) if isinstance(plan, CausalLMPlan) else _build_drafter(plan, control)
        try:
            pipeline.supervisor.run()
        except WarmedUp:
            return


def _build_drafter(plan: Plan, control: Control) -> Pipeline:
    """Shapes depend on no data, so there may be none yet."""
    path = plan.recipe.data.store
    store = Store.open(path) if path.exists() else None
    any_steps = replace(plan, total_steps=plan.total_steps or 1)
    return build_pipeline(any_steps, store, TrainState(), None, control, Targets(any_steps))


def _build_lm(plan: CausalLMPlan, control: Control) -> Pipeline:
    """Nor do they depend on the number of steps, which may be unknown."""
    if plan.total_steps is None:
        stages = tuple(replace(stage, first_step=i, num_steps=1) for i, stage in enumerate(plan.stages))
        plan = replace(plan, stages=stages, total_steps=len(stages))
    return build_lm_pipeline(plan, TrainState(), None, control)


def _default_path(plan: AnyPlan, key: Key) -> Path:
    """The recipe's own file, else one of its own for every key in the folder where `train` looks."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return plan.recipe.compile.cache or cache_folder() / f"{digest}{SUFFIX}"


def _account(log: CompileLog) -> dict[str, Any]:
    return {"components": {name: asdict(compiled) for name, compiled in log.components.items()}}


if __name__ == "__main__":
    main()
