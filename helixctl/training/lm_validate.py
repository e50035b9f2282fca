"""``helixctl validate`` for a causal LM: loss and perplexity per token on held-out windows, samples, proofs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helixctl.checkpoint.store import load_checkpoint
from helixctl.data.batch import MicroBatch
from helixctl.data.lm_loader import StageWindows, WindowLoader
from helixctl.data.sequence import Sequence
from helixctl.data.window_count import WindowSource, make_windows
from helixctl.errors import CheckpointError, ModelError
from helixctl.lm_plan import CausalLMPlan
from helixctl.models.attention import IMPLEMENTATION
from helixctl.models.causal_lm import CausalLM
from helixctl.recipe.causal_lm import stage_data
from helixctl.training.evaluate import lm_validation_metrics
from helixctl.training.jobs import LMJob
from helixctl.training.lm_build import build_lm, make_lm_slot
from helixctl.training.loop import autocast
from helixctl.training.process import set_up_process
from helixctl.training.results import Proof
from helixctl.training.run_dir import choose_checkpoint
from helixctl.training.samples import Sample, as_target, sample
from helixctl.training.stages import fill_slot
from helixctl.training.state import TrainState, check_same_lm

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how far it has come, and how much there is."""

TOLERANCE = 1e-4
"""Largest difference over the largest value in float32: two orders of summation through a whole model."""
_PROOF_DOCUMENTS = 4


@dataclass(frozen=True)
class LMValidationResult:
    """What was found."""

    checkpoint: str
    step: int
    held_out: dict[str, dict[str, float]]
    """Store -> metrics over every held-out token of it."""
    samples: tuple[Sample, ...]
    proofs: tuple[Proof, ...]


def run_lm_validation(
    plan: CausalLMPlan, *, checkpoint: Path | None = None, on_progress: Progress = lambda what, done, total: None
) -> LMValidationResult:
    """Measure a checkpoint: the one given, else the best of the run, else its newest.

    Raises:
        CheckpointError: there is none, or it is one of another model.
        DataError: a store is missing, or made with another tokenizer.
    """
    job = LMJob(plan)
    path = choose_checkpoint(plan.recipe.run.dir, checkpoint)
    set_up_process(plan)
    lm, step = load_trained_lm(plan, path, torch.device(plan.trainer_devices[0]))
    held_out = {str(store): _measure(plan, lm, stage, on_progress) for store, stage in _stores(plan).items()}
    samples: list[Sample] = []
    if prompts := plan.recipe.validation.prompts:
        on_progress("samples", 0, len(prompts))
        try:
            samples = sample(plan, as_target(plan, lm.module), job.tokenizer, prompts)
        except ModelError:
            samples = []  # an architecture that is not decoded here; training said so
    on_progress("proofs", 0, 1)
    proofs = prove_lm(plan, lm, _loader(plan, 0, 0).batch(0))
    return LMValidationResult(str(path), step, held_out, tuple(samples), tuple(proofs))


def load_trained_lm(plan: CausalLMPlan, checkpoint: Path, device: torch.device) -> tuple[CausalLM, int]:
    """The model of ``checkpoint`` on ``device``, and after how many steps it was saved.

    Raises:
        CheckpointError: torn, or of another model than the plan's.
    """
    loaded = load_checkpoint(checkpoint)
    check_same_lm(TrainState.from_json(loaded.state).fingerprints, plan)
    if "model" not in loaded.tensors:
        raise CheckpointError(f"{checkpoint} holds no causal LM", fix="name a checkpoint that `helixctl train` wrote")
    lm = build_lm(plan, device, compiled=False)
    lm.module.load_state_dict(loaded.tensors["model"])
    return lm, loaded.step


@torch.no_grad()
def prove_lm(plan: CausalLMPlan, lm: CausalLM, batch: MicroBatch) -> list[Proof]:
    """That packed documents do not see each other, and that our loss is the library's, on real rows in float32."""
    slot = make_lm_slot(plan, lm.device)
    fill_slot(slot, batch, ())
    hidden = lm.hidden(slot).float()
    worst, scale, num_documents = 0.0, 1.0, 0
    loss, count = 0.0, 0
    for row, spans in enumerate(batch.spans):
        for start, end in spans[:_PROOF_DOCUMENTS]:
            logits, states = _alone(lm.module, slot.input_ids[row : row + 1, start:end])
            worst = max(worst, float((states - hidden[row, start:end]).abs().max()))
            scale = max(scale, float(states.abs().max()))
            learnt = slot.loss_mask[row, start + 1 : end]
            labels = slot.input_ids[row, start + 1 : end]
            losses = torch.nn.functional.cross_entropy(logits[:-1].float(), labels, reduction="none")
            loss, count = loss + float(losses[learnt].sum()), count + int(learnt.sum())
            num_documents += 1
        for start, end in spans[_PROOF_DOCUMENTS:]:
            slot.loss_mask[row, start:end] = False
    ours = lm.evaluate(slot)
    gap = abs(float(ours["loss_num"]) - loss) / max(1.0, loss)
    return [
        Proof(
            "a packed row gives every document what it gives alone",
            worst <= TOLERANCE * scale,
            f"states of {num_documents} documents differ by {worst:.1e}, their largest value is {scale:.1f}",
        ),
        Proof(
            "the loss is that of the library's own logits",
            gap <= TOLERANCE and int(ours["loss_den"]) == count,
            f"{loss / max(1, count):.4f} per token over {count} tokens; relative difference {gap:.1e}",
        ),
    ]


def _alone(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [S, V] and final states [S, H] of one document by the library's own attention and head."""
    ours = model.config._attn_implementation
    model.config._attn_implementation = "sdpa" if ours == IMPLEMENTATION else ours
    try:
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return model(input_ids=ids, use_cache=False).logits[0], states[0]
    finally:
        model.config._attn_implementation = ours


def _stores(plan: CausalLMPlan) -> dict[Path, int]:
    """Every store with held-out windows, and the first stage that reads it."""
    found: dict[Path, int] = {}
    for stage, planned in enumerate(plan.stages):
        if planned.held_out_windows:
            found.setdefault(stage_data(plan.recipe, stage).store, stage)
    return found


@torch.no_grad()
def _measure(plan: CausalLMPlan, lm: CausalLM, stage: int, on_progress: Progress) -> dict[str, float]:
    """Over every held-out window of the stage's store, each once."""
    rows = plan.recipe.train.micro_batch_rows
    num_batches = -(-(plan.stages[stage].held_out_windows or 0) // rows)
    loader, slot = _loader(plan, stage, num_batches), make_lm_slot(plan, lm.device)
    sums: dict[str, Tensor] = {}
    for number in range(num_batches):
        fill_slot(slot, loader.batch(1 + number), ())
        with autocast(plan, lm.device):
            for name, value in lm.evaluate(slot).items():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
        on_progress("held-out rows", number + 1, num_batches)
    return lm_validation_metrics(sums)


def _loader(plan: CausalLMPlan, stage: int, num_batches: int) -> WindowLoader:
    """One training batch, then one pass over the held-out windows of a stage."""
    recipe, rows = plan.recipe, plan.recipe.train.micro_batch_rows
    source = WindowSource(stage_data(recipe, stage), rows, recipe.run.seed, stage)
    train = make_windows(source, "train")
    assert train is not None, "the plan checks that there are windows"
    windows = StageWindows(0, train, make_windows(source, "validation") if num_batches else None)
    return WindowLoader([windows], Sequence(1, 1, 1 if num_batches else 0, num_batches), rows)
