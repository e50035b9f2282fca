"""``helixctl export`` and ``helixctl prepare --regenerate``: load what they need, then call the part that does it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from helixctl.checkpoint.export import (
    ExportResult,
    ExportSource,
    check_replaceable,
    export_drafter,
)
from helixctl.checkpoint.published import default_format, load_format
from helixctl.data.answers import check_writable
from helixctl.data.prompts import read_prompts
from helixctl.data.regenerate import RegenerateJob, RegenerateResult, regenerate
from helixctl.errors import Problem, RecipeError, UsageError
from helixctl.models.tokenizer import load_tokenizer
from helixctl.plan import Plan
from helixctl.training.build import load_target
from helixctl.training.process import set_up_process
from helixctl.training.restore import load_trained
from helixctl.training.run_dir import choose_checkpoint

_PLACES = {"init_from"}
"""Options of drafters that name a place on this machine."""


@dataclass(frozen=True)
class ExportRequest:
    """What `helixctl export` was asked for."""

    checkpoint: Path | None = None
    """A checkpoint of the run, or a published drafter; None takes the best of the run, else its newest."""
    output: Path | None = None
    """Folder of the export; None takes one in the run directory."""
    format: str | None = None
    """None takes the algorithm's own."""
    base_model: str | None = None
    """Name that the target is published under, where the recipe names a folder."""
    license: str | None = None
    """Of the drafter, for its card."""


def run_export(plan: Plan, request: ExportRequest | None = None) -> ExportResult:
    """Export a checkpoint: the one given, else the best of the run, else its newest.

    Raises:
        CheckpointError: there is no whole checkpoint, the folder holds something else or cannot be written, or what was
            written does not read back equal.
        UsageError: there is no such format.
    """
    request = request or ExportRequest()
    algorithm = plan.recipe.drafter.algorithm
    form = request.format or default_format(algorithm)
    load_format(algorithm, form)
    default = "export" if form == default_format(algorithm) else f"export-{form}"
    destination = request.output or plan.recipe.run.dir / default
    check_replaceable(destination)
    path = choose_checkpoint(plan.recipe.run.dir, request.checkpoint)
    trained = load_trained(plan, path, torch.device("cpu"))
    source = ExportSource(
        options=plan.recipe.drafter,
        facts=plan.target,
        taps=plan.target_layer_ids,
        target=request.base_model or plan.recipe.target.model,
        step=trained.step,
        metrics=_metrics(plan.recipe.run.dir, trained.step),
        format=form,
        license=request.license,
        recipe=_public_recipe(plan),
    )
    return export_drafter(trained.model, source, destination)


def _public_recipe(plan: Plan) -> str:
    """What others need to know of the recipe: no place on this machine."""
    recipe = plan.recipe.model_dump(mode="json", exclude={"drafter"})
    shown = {
        "drafter": plan.recipe.drafter.model_dump(mode="json", exclude_none=True, exclude=_PLACES),
        "train": {name: value for name, value in recipe["train"].items() if value is not None},
        "data": {name: recipe["data"][name] for name in ("seq_len", "packing", "mask_policy")},
    }
    return yaml.safe_dump(shown, sort_keys=False)


def run_regeneration(
    plan: Plan, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> RegenerateResult:
    """Let the target answer the recipe's prompts; goes on where an earlier call stopped.

    ``on_progress`` gets the prompts accounted for, and all of them.

    Raises:
        RecipeError: the recipe names no prompts, or the answers would not be read as chats.
        UsageError, DataError: see ``data.regenerate``.
    """
    data = plan.recipe.data
    if data.regenerate.prompts is None:
        fix = "set data.regenerate.prompts to a JSONL file of prompts"
        raise RecipeError([Problem("data.regenerate.prompts", "there are no prompts to answer", fix=fix)])
    output = data.train[0].path
    if output is None or data.train[0].format != "chat":
        fix = "give data.train[0] a path and format: chat; its path is where the answers go"
        raise RecipeError([Problem("data.train[0]", "answers are written to a file, as chats", fix=fix)])
    if plan.target.recurrent:
        raise UsageError(f"{plan.target.model_type} targets cannot be decoded yet", fix="write the answers elsewhere")
    check_writable(output)
    set_up_process(plan)
    job = RegenerateJob(
        prompts=data.regenerate.prompts,
        output=output,
        model=plan.recipe.target.model,
        options=data.regenerate,
        stop_ids=frozenset(plan.target.eos_token_ids),
        max_len=plan.target.max_positions or sys.maxsize,
        seed=plan.recipe.run.seed,
    )
    tokenizer = load_tokenizer(plan.recipe.target)
    total = sum(1 for _ in read_prompts(job.prompts))
    target = load_target(plan, plan.target_devices[0])
    return regenerate(target, tokenizer, job, on_progress=lambda now: on_progress(now.num_done, total))


def _metrics(run_dir: Path, step: int) -> dict[str, float]:
    """What validation measured at ``step``, for the model card; nothing where it was not validated."""
    found: dict[str, float] = {}
    path = run_dir / "metrics.jsonl"
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["step"] == step:
                found |= {name: value for name, value in entry.items() if name.startswith(("val/", "live/"))}
    return found
