"""What the renderer shows of causal LMs, as titles, labels and texts. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from helixctl.cli.source_tables import mix_rows
from helixctl.cli.tables import UNKNOWN, count_of, devices_of
from helixctl.cli.values import format_bytes, format_millions, format_value

if TYPE_CHECKING:
    from helixctl.lm_plan import CausalLMPlan, PlannedStage
    from helixctl.training.lm_validate import LMValidationResult

_MAX_SAMPLE = 400
"""Characters of a sample that are shown."""


def lm_plan_sections(plan: CausalLMPlan) -> Iterator[tuple[str, dict[str, str]]]:
    """A plan, section by section; the memory table is apart."""
    recipe, model = plan.recipe, plan.model
    yield (
        "model",
        {
            "begins with": recipe.model.checkpoint or "random weights",
            "shape": f"{model.model_type}, {model.num_layers} layers of {model.hidden_size}, "
            f"vocabulary {model.vocab_size:,}, {format_millions(plan.parameters)} parameters",
            "tokenizer": recipe.model.tokenizer_base,
            "dtype": f"{plan.compute_dtype}, float32 masters",
            "devices": devices_of(plan.trainer_devices),
        },
    )
    yield "data", _data_rows(plan)
    for number, stage in enumerate(plan.stages):
        yield f"stage {number}", _stage_rows(plan, stage)
    yield "training", _training_rows(plan)


def lm_validation_sections(result: LMValidationResult) -> Iterator[tuple[str, dict[str, str]]]:
    """What `validate` found, section by section."""
    yield "validated", {"checkpoint": result.checkpoint, "step": f"{result.step:,}"}
    for store, metrics in result.held_out.items():
        yield f"held out, {store}", {name: format_value(name, value) for name, value in metrics.items()}
    if result.samples:
        yield "samples", {repr(one.prompt): one.text[:_MAX_SAMPLE] for one in result.samples}
    yield (
        "proofs",
        {("passed" if p.passed else "FAILED") + f": {p.name}": p.detail for p in result.proofs},
    )


def _data_rows(plan: CausalLMPlan) -> dict[str, str]:
    data = plan.recipe.data
    rows = {"store": str(data.store), "rows": f"{data.seq_len:,} tokens, packing {data.packing}"}
    if plan.train_documents is None:
        return {**rows, "documents": UNKNOWN}
    rows["documents"] = f"{plan.train_documents:,} for training, {plan.validation_documents:,} held out"
    rows |= mix_rows(plan.mix)
    rows["learnt"] = f"{100 * (plan.supervised_share or 0):.1f} % of the tokens"
    return rows


def _stage_rows(plan: CausalLMPlan, stage: PlannedStage) -> dict[str, str]:
    options = stage.options
    rows = {"documents": str(options.data.store)} if options.data is not None else {}
    if stage.num_steps is None:
        rows["steps"] = UNKNOWN
    else:
        tokens = stage.num_steps * plan.tokens_per_step
        passes = "" if stage.epochs is None else f", {stage.epochs:.2f} passes over {stage.windows:,} rows"
        rows["steps"] = f"{stage.num_steps:,}, {stage.warmup_steps:,} of them warm-up: about {tokens:,} tokens{passes}"
    end = f" to {options.min_lr_ratio:g} of it" if options.schedule != "constant" else ""
    rows["learning rate"] = f"{options.learning_rate:g}, {options.schedule}{end}"
    if stage.first_step:
        rows["optimizer"] = {"carry": "goes on from the stage before", "fresh": "begins anew"}[options.optimizer]
    return rows


def _training_rows(plan: CausalLMPlan) -> dict[str, str]:
    train, validation = plan.recipe.train, plan.recipe.validation
    accumulated = f" x {train.grad_accum_steps} accumulated" if train.grad_accum_steps > 1 else ""
    loops = f" x {plan.num_trainers} loops" if plan.num_trainers > 1 else ""
    rows = {
        "step": f"{count_of(plan.rows_per_step, 'row')}, about {plan.tokens_per_step:,} tokens: "
        f"{train.micro_batch_rows} per micro-batch{accumulated}{loops}",
        "steps": UNKNOWN if plan.total_steps is None else f"{plan.total_steps:,} in all",
        "validation": f"every {validation.every_steps:,} steps, "
        f"{count_of(plan.validation_batches, 'micro-batch', 'es')}"
        if plan.validation_batches
        else "off",
        "checkpoints": f"every {plan.recipe.checkpoint.every_steps:,} steps in {plan.recipe.run.dir}, "
        f"{format_bytes(plan.disk_bytes_per_checkpoint)} each",
    }
    if plan.flops_per_token is not None:
        rows["work"] = f"{plan.flops_per_token / 1e6:,.0f} MFLOP per token"
    if plan.world.size > 1:
        rows["processes"] = f"{plan.world.size}, of which this is number {plan.world.rank}; each as above"
    return rows
