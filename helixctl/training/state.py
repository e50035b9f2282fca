"""What a checkpoint holds beside weights and moments, and the fingerprints that tie it to its run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from helixctl.errors import CheckpointError, UsageError
from helixctl.lm_plan import AnyPlan, CausalLMPlan
from helixctl.plan import Plan


@dataclass
class TrainState:
    """Every number that training needs to go on exactly where it was."""

    step: int = 0
    """Optimizer steps taken; the number of the next micro-batch follows from it."""
    trained_tokens: int = 0
    trained_documents: int = 0
    """Documents of the micro-batches trained, repeats included."""
    bad_documents: int = 0
    """Of these, documents left out because their features were not finite."""
    skipped_steps: int = 0
    """Steps whose gradient norm was not finite."""
    train_seconds: float = 0.0
    best_value: float | None = None
    best_step: int | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``state.json``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainState:
        """The inverse of ``to_json``; refuses a state with other fields.

        Raises:
            CheckpointError: the fields are not those of this version.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if set(values) != known:
            odd = ", ".join(sorted(set(values) ^ known))
            raise CheckpointError(f"the checkpoint's state has other fields than this version: {odd}")
        return cls(**values)


_FREE_TO_CHANGE = {"log_every_steps", "epochs", "steps", "grad_accum_steps", "max_bad_fraction"}
"""Training options that may differ after a resume; what they derive to is compared instead."""


_STAGE_FREE_TO_CHANGE = {"epochs", "steps", "tokens", "data"}
"""The same for training stages; where each begins, and its data, are compared instead."""


def num_steps(plan: AnyPlan) -> int:
    """The optimizer steps of a plan whose data has been counted.

    Raises:
        UsageError: the plan was made before the data was prepared.
    """
    if plan.total_steps is None:
        raise UsageError(f"there is no prepared store at {plan.recipe.data.store}", fix="run `helixctl prepare` first")
    return plan.total_steps


def make_fingerprints(plan: AnyPlan, store: Mapping[str, str]) -> dict[str, str]:
    """Short hashes of everything that must not change between a run and its resumption.

    ``store`` names the data, tokenizer and chat template fingerprints of the prepared stores.
    """
    recipe = plan.recipe
    parts: dict[str, Any] = {
        "sequence length": recipe.data.seq_len,
        "packing": recipe.data.packing,
        "rows per step": plan.rows_per_step,
        "validation": (recipe.validation.every_steps, recipe.validation.rows),
        "seed": recipe.run.seed,
        "total steps": num_steps(plan),
        "optimizer": recipe.train.model_dump(mode="json", exclude=_FREE_TO_CHANGE),
    }
    hashed = {name: _digest(value) for name, value in parts.items()}
    own = _lm_fingerprints(plan) if isinstance(plan, CausalLMPlan) else _trained_drafter_fingerprints(plan)
    return {**hashed, **own, **store}


def check_fingerprints(saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Refuse to resume a run that another recipe, target or data set started.

    Raises:
        CheckpointError: names everything that differs.
    """
    changed = sorted(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name))
    if changed:
        raise CheckpointError(
            f"cannot resume: changed since the checkpoint was written: {', '.join(changed)}",
            fix="restore them, or start a new run with another run.dir",
        )


def check_same_drafter(saved: Mapping[str, str], plan: Plan) -> None:
    """Refuse to decode or export a drafter with another target, other taps or another mask token than it learned with.

    Raises:
        CheckpointError: names everything that differs.
    """
    changed = sorted(name for name, value in _drafter_fingerprints(plan).items() if saved.get(name) != value)
    if changed:
        raise CheckpointError(
            f"the checkpoint was trained with another {', '.join(changed)} than the recipe names",
            fix="use the recipe of the run: recipe.yaml in its run.dir",
        )


def check_same_lm(saved: Mapping[str, str], plan: CausalLMPlan) -> None:
    """Refuse to use the weights of another model.

    Raises:
        CheckpointError: the checkpoint is of another configuration than the recipe's.
    """
    if saved.get("model") != _digest((plan.model.raw, plan.recipe.model.checkpoint)):
        raise CheckpointError(
            "the checkpoint was trained with another model than the recipe names",
            fix="use the recipe of the run: recipe.yaml in its run.dir",
        )


def _trained_drafter_fingerprints(plan: Plan) -> dict[str, str]:
    drafter = plan.recipe.drafter
    parts = {"block size": drafter.block_size, "drafter": drafter.model_dump(mode="json")}
    if plan.recipe.data.curriculum.epochs:
        parts["curriculum"] = plan.recipe.data.curriculum.model_dump(mode="json")
    if plan.float8 is not None:
        parts["target's quantization"] = dataclasses.asdict(plan.float8)
    return {**{name: _digest(value) for name, value in parts.items()}, **_drafter_fingerprints(plan)}


def _lm_fingerprints(plan: CausalLMPlan) -> dict[str, str]:
    recipe = plan.recipe
    stages = [(s.first_step, s.options.model_dump(mode="json", exclude=_STAGE_FREE_TO_CHANGE)) for s in plan.stages]
    parts = {
        "model": (plan.model.raw, recipe.model.checkpoint),
        "stages": stages,
        "windows": (recipe.data.stride, recipe.data.min_tail_len),
    }
    return {name: _digest(value) for name, value in parts.items()}


def _drafter_fingerprints(plan: Plan) -> dict[str, str]:
    """What a drafter means nothing without."""
    parts = {
        "target": plan.target.raw,
        "taps": plan.target_layer_ids,
        "mask token": plan.recipe.drafter.mask_token_id,
    }
    return {name: _digest(value) for name, value in parts.items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
