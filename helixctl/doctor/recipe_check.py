"""`helixctl doctor --recipe R`: what would go wrong with a recipe, or go slowly, before anything is trained.

The plan's own mistakes and warnings come first; where there is no plan, nothing else can be judged. What needs the
tokenizer is in `recipe_tokens.py`. Never imports torch itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from helixctl.doctor import recipe_tokens
from helixctl.doctor.environment_host import Host, existing_parent
from helixctl.doctor.environment_nvml import NvmlProblem
from helixctl.doctor.probe import Outcome, Probe, Verdict, fail, ok, run_probes, skip, warn
from helixctl.errors import HelixError, RecipeError
from helixctl.lm_plan import AnyPlan, CausalLMPlan, make_any_plan
from helixctl.machine import Machine
from helixctl.memory import device_bytes, memory_warnings
from helixctl.plan import Plan
from helixctl.recipe.load import load_any_recipe, locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from helixctl.data.store import Store

_TIGHT = 0.95
"""Share of a device's memory above which the estimate may be too low."""
_DISK_TIGHT = 0.8
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_PLAN_ID, _PLAN_NAME = "REC001", "plan"


@dataclass
class RecipeCase:
    """A planned recipe, the machine it was planned for, and what is loaded once for several checks."""

    plan: Plan
    machine: Machine
    host: Host = field(default_factory=Host)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's; ModelError where there is none, for every check that asks."""
        from helixctl.data.fingerprint import load_fast_tokenizer

        return load_fast_tokenizer(self.plan.recipe.target)

    @cached_property
    def store(self) -> Store | None:
        """The prepared store; None before `prepare` has run, DataError where it is torn."""
        from helixctl.data.store import Store

        path = self.plan.recipe.data.store
        return Store.open(path) if path.exists() else None


def check_recipe(path: Path, overrides: Sequence[str], machine: Machine, host: Host) -> Iterator[Outcome]:
    """All outcomes for the recipe at `path`."""
    try:
        plan = _make_plan(path, overrides, machine)
    except RecipeError as error:
        for problem in error.problems:
            where = f"{problem.where}: " if problem.where else ""
            yield _plan_outcome(fail(f"{where}{problem.key} {problem.message}", problem.fix))
        return
    except HelixError as error:
        yield _plan_outcome(fail(error.message, error.fix))
        return
    if isinstance(plan, CausalLMPlan):
        yield from _check_causal_lm(plan)
        return
    yield from run_probes(RECIPE, RecipeCase(plan, machine, host))


def _check_causal_lm(plan: CausalLMPlan) -> Iterator[Outcome]:
    """What the plan finds; the checks of targets and drafters do not apply."""
    for problem in plan.lacks:
        yield _plan_outcome(fail(problem.message, problem.fix))
    for warning in plan.warnings:
        what, _, remedy = warning.partition(": ")
        yield _plan_outcome(warn(what, remedy or "change the recipe, or leave it if that is what you want"))
    if not (plan.lacks or plan.warnings):
        yield _plan_outcome(ok(f"{plan.total_steps} steps of {plan.rows_per_step} rows"))


def check_plan(case: RecipeCase) -> Iterator[Verdict]:
    """The plan's warnings; memory has a check of its own."""
    apart = set(memory_warnings(case.plan.memory, case.machine))
    told = [warning for warning in case.plan.warnings if warning not in apart]
    for warning in told:
        what, _, remedy = warning.partition(": ")
        yield warn(what if remedy else warning, remedy or "change the recipe, or leave it if that is what you want")
    if not told:
        yield ok(f"{case.plan.total_steps} steps of {case.plan.rows_per_step} rows")


def check_taps(case: RecipeCase) -> Verdict:
    """Where features are taken."""
    taps, last = case.plan.target_layer_ids, case.plan.target.num_layers - 1
    told = f"taps {', '.join(map(str, taps))} of layers 0 to {last}"
    if last in taps:
        text = (
            f"{told}: serving engines and published drafters read layer {last}'s state behind the final norm, helixctl "
            "trains on the state before it"
        )
        return warn(text, f"leave layer {last} out of drafter.target_layer_ids")
    return ok(told)


def check_memory(case: RecipeCase) -> Iterator[Verdict]:
    """The estimate against what each device has, and has left now."""
    lines = case.plan.memory
    for device in dict.fromkeys(line.device for line in lines):
        needed = sum(line.num_bytes for line in lines if line.device == device)
        total, free = device_bytes(device, case.machine), _free_bytes(case, device)
        text = f"{device} needs about {_gib(needed)} of {_gib(total)}"
        fix = "lower train.micro_batch_rows, data.seq_len or drafter.num_anchors, or use more devices"
        if needed > total:
            yield fail(text, fix)
        elif needed > _TIGHT * total:
            yield warn(text, fix)
        elif free is not None and needed > free:
            yield warn(f"{text}, and only {_gib(free)} are free now", "end what uses it, or use another device")
        else:
            yield ok(text)


def check_loaders(case: RecipeCase) -> Iterator[Verdict]:
    """Processes and threads against the cores."""
    recipe, cpus, own = case.plan.recipe, case.machine.num_cpus, case.machine.own_cpus
    shared = f"{own} cores" if own == cpus else f"{own} of {cpus} cores for each process"
    found = []
    if recipe.data.workers > cpus:
        found.append(warn(f"data.workers is {recipe.data.workers}, with {cpus} cores", f"set data.workers: {cpus}"))
    if recipe.pipeline.readers > own:
        text = f"pipeline.readers is {recipe.pipeline.readers}, with {shared}"
        found.append(warn(text, "one reader is enough for most runs: pipeline.readers: 1"))
    if recipe.validation.num_workers:
        text = f"validation.num_workers is {recipe.validation.num_workers}, and validation starts no processes"
        found.append(warn(text, "set validation.num_workers: 0"))
    if recipe.pipeline.threads != "auto" and recipe.pipeline.threads > own:
        text = f"pipeline.threads is {recipe.pipeline.threads} for each stage, with {shared}"
        found.append(warn(text, "set pipeline.threads: auto"))
    every, steps = recipe.validation.every_steps, case.plan.total_steps
    if every and steps is not None and every > steps:
        text = f"validation.every_steps is {every}, and there are {steps} steps: nothing shows before the end"
        found.append(warn(text, f"set validation.every_steps: {max(1, steps // 10)}"))
    yield from found or [ok(f"{recipe.data.workers} prepare processes, {recipe.pipeline.readers} readers, {shared}")]


def check_paths(case: RecipeCase) -> Iterator[Verdict]:
    """What is read exists, what is written can be."""
    recipe = case.plan.recipe
    found = [*_check_sources(case), *_check_model(recipe.target.model)]
    written = {"run.dir": recipe.run.dir, "data.store": recipe.data.store, "compile.cache": recipe.compile.cache}
    for key, path in written.items():
        if path is not None and not os.access(existing_parent(path), os.W_OK | os.X_OK):
            found.append(
                fail(f"{key} {path} cannot be written", f"make it writable, or choose another: --set {key}=...")
            )
    if any((recipe.run.dir / "checkpoints").glob("step-*")):
        fix = "go on with `helixctl train --resume`, or choose another folder: --set run.dir=..."
        found.append(warn(f"run.dir {recipe.run.dir} holds a run", fix))
    yield from found or [ok("sources, target and folders are there")]


def check_disk(case: RecipeCase) -> Verdict:
    """Room for the checkpoints that are kept, the best, and the one being written."""
    recipe = case.plan.recipe
    count = recipe.checkpoint.keep_last + 2
    needed, free = count * case.plan.disk_bytes_per_checkpoint, case.host.space(recipe.run.dir).free_bytes
    text = f"{count} checkpoints need {_gib(needed)}, {_gib(free)} are free"
    fix = "make room, lower checkpoint.keep_last, or choose another folder: --set run.dir=..."
    if needed > free:
        return fail(text, fix)
    return warn(text, fix) if needed > _DISK_TIGHT * free else ok(text)


def check_determinism(case: RecipeCase) -> Verdict:
    """Matrix products repeat themselves only when cuBLAS has a workspace of fixed size."""
    if not case.plan.recipe.run.deterministic:
        return skip("run.deterministic is off")
    on_gpu = any(device != "cpu" for device in (*case.plan.target_devices, *case.plan.drafter_devices))
    if on_gpu and case.host.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        return fail("run.deterministic on a GPU needs a fixed cuBLAS workspace", "set CUBLAS_WORKSPACE_CONFIG=:4096:8")
    return ok("runs repeat bit for bit")


def _make_plan(path: Path, overrides: Sequence[str], machine: Machine) -> AnyPlan:
    try:
        return make_any_plan(load_any_recipe(path, overrides), machine)
    except RecipeError as error:
        raise locate(error, path, overrides) from None


def _plan_outcome(verdict: Verdict) -> Outcome:
    return Outcome(_PLAN_ID, _PLAN_NAME, verdict.state, verdict.message, verdict.remedy, 0.0)


def _check_sources(case: RecipeCase) -> Iterator[Verdict]:
    data = case.plan.recipe.data
    groups = {"data.train": data.train, "data.validation.sources": data.validation.sources}
    for key, sources in groups.items():
        for number, source in enumerate(sources):
            if source.path is None:
                yield skip(f"{key}[{number}].dataset {source.place} is opened by `prepare`", "run it once")
                continue
            where = f"{key}[{number}].path {source.path}"
            if not source.path.exists():
                if data.store.exists():
                    yield warn(f"{where} is gone; only the store can be used", "put it back before the next prepare")
                elif data.regenerate.prompts is not None and key == "data.train" and number == 0:
                    yield skip(f"{where} is not there yet", "`helixctl prepare --regenerate` writes it")
                else:
                    yield fail(f"{where} does not exist", "correct the path")
            elif not os.access(source.path, os.R_OK):
                yield fail(f"{where} cannot be read", "make it readable")
    prompts = data.regenerate.prompts
    if prompts is not None and not prompts.exists():
        yield fail(f"data.regenerate.prompts {prompts} does not exist", "correct the path")


def _check_model(model: str) -> Iterator[Verdict]:
    folder = Path(model)
    if not folder.is_dir():
        yield skip(f"target.model {model} is a name on the hub", "download it first to train without a network")
    elif not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        yield fail(f"target.model {model} holds no weights", "download the model again")


def _free_bytes(case: RecipeCase, device: str) -> int | None:
    if device == "cpu":
        return int(psutil.virtual_memory().available)
    found, wanted = case.host.gpus, case.machine.gpus[int(device.removeprefix("cuda:"))]
    for gpu in () if isinstance(found, NvmlProblem) else found.gpus:
        if gpu.uuid == wanted.uuid and gpu.total_bytes is not None and gpu.used_bytes is not None:
            return gpu.total_bytes - gpu.used_bytes
    return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:.0f} MiB"


RECIPE: tuple[Probe[RecipeCase], ...] = (
    Probe(_PLAN_ID, _PLAN_NAME, check_plan),
    Probe("REC007", "taps", check_taps),
    Probe("REC008", "memory", check_memory),
    Probe("REC009", "loaders", check_loaders),
    Probe("REC010", "paths", check_paths),
    Probe("REC011", "disk", check_disk),
    Probe("REC012", "determinism", check_determinism),
    Probe("REC002", "tokenizer", recipe_tokens.check_tokenizer),
    Probe("REC003", "chat template", recipe_tokens.check_template),
    Probe("REC004", "store", recipe_tokens.check_store),
    Probe("REC005", "supervision", recipe_tokens.check_supervision),
    Probe("REC006", "mask token", recipe_tokens.check_mask_token),
)
