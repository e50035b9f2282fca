"""``helixctl export`` for a causal LM: loads what it needs, then calls the part that does it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml

from helixctl.checkpoint.export import ExportResult
from helixctl.checkpoint.lm_export import LMCard, check_lm_replaceable, export_lm
from helixctl.lm_plan import CausalLMPlan
from helixctl.models.tokenizer import HelixTokenizer
from helixctl.training.lm_validate import load_trained_lm
from helixctl.training.run_dir import choose_checkpoint


def run_lm_export(
    plan: CausalLMPlan, *, checkpoint: Path | None = None, output: Path | None = None, license_: str | None = None
) -> ExportResult:
    """Export a checkpoint as a Hugging Face folder: the one given, else the best of the run, else its newest.

    Raises:
        CheckpointError: there is no whole checkpoint, the folder holds something else or cannot be written, or what was
            written does not read back equal.
    """
    destination = output or plan.recipe.run.dir / "export"
    check_lm_replaceable(destination)
    lm, step = load_trained_lm(plan, choose_checkpoint(plan.recipe.run.dir, checkpoint), torch.device("cpu"))
    tokenizer = HelixTokenizer(plan.recipe.model.tokenizer_base)
    name = plan.recipe.run.dir.name if destination.name == "export" else destination.name
    card = LMCard(name, license_, step, _metrics(plan.recipe.run.dir, step), _public_recipe(plan))
    return export_lm(lm.module, tokenizer, card, destination)


def _public_recipe(plan: CausalLMPlan) -> str:
    """What others need to know of the recipe: no place on this machine."""
    recipe = plan.recipe.model_dump(mode="json", exclude_none=True)
    stages = [{name: value for name, value in stage.items() if name != "data"} for stage in recipe["stages"]]
    shown = {
        "stages": stages,
        "train": recipe["train"],
        "data": {name: recipe["data"][name] for name in ("seq_len", "packing")},
    }
    return yaml.safe_dump(shown, sort_keys=False)


def _metrics(run_dir: Path, step: int) -> dict[str, float]:
    """What validation measured at ``step``; nothing where it was not validated."""
    path, found = run_dir / "metrics.jsonl", dict[str, float]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        entry = json.loads(line)
        if entry["step"] == step:
            found |= {name: value for name, value in entry.items() if name.startswith("val/")}
    return found
