"""Compiles before the gate: a target and a drafter run once on made-up rows of the run's own shapes.

Tracing in one thread breaks compiled calls in others, so everything that compiles does so in ``setup()``, which the
supervisor serialises. On a CPU nothing is compiled and nothing is warmed up, unless ``compile.mode`` is on. The slot is
the fullest there can be: what fits here fits for the whole run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from helixctl.data.batch import MicroBatch, SlotBatch
from helixctl.lm_plan import AnyPlan
from helixctl.models.target import Target
from helixctl.plan import Plan
from helixctl.training.stages import fill_slot

PASSES = 2
"""The first compiles, the second runs what autotuning and lazy backward graphs have left for later."""


LAUNCH_BOUND_FLOP = 5e13
"""A pass of less work than this is over in a tenth of a second on any current GPU."""


def compiles(plan: AnyPlan, device: torch.device) -> bool:
    """Whether anything is compiled on ``device``."""
    return plan.recipe.compile.covers(str(device))


def captures(plan: Plan) -> bool:
    """Whether a drafter's training pass is captured: where it is short, launching its kernels is most of its time."""
    if plan.recipe.compile.graphs != "auto":
        return plan.recipe.compile.graphs == "on"
    recipe = plan.recipe
    slots = recipe.train.micro_batch_rows * recipe.drafter.num_anchors * recipe.drafter.block_size
    context = recipe.train.micro_batch_rows * recipe.data.seq_len
    work = 6 * plan.parameters * (slots + context / 3) + 4 * slots * plan.target.vocab_size * plan.target.hidden_size
    return bool(work < LAUNCH_BOUND_FLOP)


def forbid_recompiling(plan: AnyPlan) -> None:
    """From now on a recompilation raises and names the guard, where the recipe says so. Reaches the whole process."""
    devices = [torch.device(device) for device in plan.devices]
    if plan.recipe.compile.on_recompile == "fail" and any(compiles(plan, device) for device in devices):
        torch.compiler.set_stance("fail_on_recompile")


def allow_recompiling() -> None:
    """Undo ``forbid_recompiling`` at the end of a run."""
    torch.compiler.set_stance("default")


def made_up_batch(plan: Plan) -> MicroBatch:
    """Rows of two documents (one where rows are not packed), fully supervised, with every anchor in use."""
    recipe = plan.recipe
    rows, tokens, anchors = recipe.train.micro_batch_rows, recipe.data.seq_len, recipe.drafter.num_anchors
    half = tokens // 2 if plan.packing else tokens
    spans = tuple((start, min(start + half, tokens)) for start in range(0, tokens, half))
    positions = torch.cat([torch.arange(end - start) for start, end in spans])
    documents = torch.cat([torch.full((end - start,), i, dtype=torch.int32) for i, (start, end) in enumerate(spans)])
    places = (torch.arange(anchors) * (tokens - 1) // anchors).sort().values
    generator = torch.Generator().manual_seed(0)
    return MicroBatch(
        seq=0,
        role="train",
        index=0,
        epoch=0,
        input_ids=torch.randint(plan.target.vocab_size, (rows, tokens), generator=generator),
        position_ids=positions.expand(rows, -1).clone(),
        document_ids=documents.expand(rows, -1).clone(),
        loss_mask=torch.ones((rows, tokens), dtype=torch.bool),
        anchors=places.expand(rows, -1).clone(),
        anchor_valid=torch.ones((rows, anchors), dtype=torch.bool),
        documents=tuple(tuple(range(len(spans))) for _ in range(rows)),
        spans=tuple(spans for _ in range(rows)),
    )


def warm_up_target(target: Target, plan: Plan) -> None:
    """Compile what the target compiles."""
    if compiles(plan, target.device):
        for _ in range(PASSES):
            target.features(made_up_batch(plan), last_hidden=plan.last_hidden)
        _finish(target.device)  # nothing of the warm-up is left when the gate opens


def warm_up_drafter(slot: SlotBatch, plan: Plan, passes: Callable[[], None]) -> None:
    """Run ``passes``, a training pass with its backward and a validation pass, on a made-up slot; leaves it empty."""
    batch = made_up_batch(plan)
    generator = torch.Generator().manual_seed(0)
    shape = slot.features[0].shape
    num_features = len(slot.features) + (slot.last_hidden is not None)
    features: list[Tensor] = [torch.randn(shape, generator=generator) for _ in range(num_features)]
    fill_slot(slot, batch, features)
    run_passes(slot, passes)


def run_passes(slot: SlotBatch, passes: Callable[[], None]) -> None:
    """Run ``passes`` on a filled slot as often as it takes until nothing is left to compile; empties the slot."""
    for _ in range(PASSES):
        passes()
    slot.batch = None
    _finish(slot.input_ids.device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
