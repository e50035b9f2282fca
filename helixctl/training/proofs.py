"""Proofs that training and serving agree, on the user's own target and drafter (``docs/architecture.md``).

1. The block logits of a training forward equal those of the decode loop for the same context.
2. Changing features at or after an anchor changes nothing in its block, bit for bit.
3. Captured features equal a plain forward of the target with ``output_hidden_states``; the final norm and the head on
   the captured last state give the target's own logits.
4. Greedy speculative output equals plain greedy output.

Legend: S tokens of one document, A anchors, B block size, H target width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from helixctl.data.batch import MicroBatch, SlotBatch, make_document_batch
from helixctl.models.proof import prove_capture
from helixctl.models.shared import SharedWeights
from helixctl.models.target import Target
from helixctl.plan import Plan
from helixctl.training.live import make_policy
from helixctl.training.results import GreedyCheck, Proof
from helixctl.training.stages import fill_slot, make_slot

MAX_TOKENS = 256
"""Tokens of a document that are enough for the proofs."""
EXACT = ("float32", "float64 with float8 products")
"""Precisions of a target in which rounding changes no token."""
TOLERANCE = 2e-3
"""Largest difference over the largest value, in float32: two orders of summation through a whole model."""


def prove(
    plan: Plan, model: nn.Module, target: Target, document: tuple[list[int], list[bool]], check: GreedyCheck | None
) -> tuple[Proof, ...]:
    """All proofs on one held-out document (ids and loss mask), the target in float32."""
    batch = one_document(*document, plan.recipe.drafter.num_anchors)
    features = target.features(batch)
    slot = make_slot(
        (1, batch.input_ids.shape[1], batch.anchors.shape[1]),
        len(features),
        target.facts.hidden_size,
        target.device,
        target.dtype,
    )
    fill_slot(slot, batch, features)
    proofs = [
        same_logits(plan, model, slot, target.shared),
        no_leak(model, slot, target.shared),
        captured(target, batch.input_ids[0]),
    ]
    return (*proofs, lossless(check)) if check is not None else tuple(proofs)


@torch.no_grad()
def same_logits(plan: Plan, model: nn.Module, slot: SlotBatch, shared: SharedWeights) -> Proof:
    """Proof 1: every valid block, trained forward against the decode loop's."""
    policy: Any = make_policy(plan, model, shared)
    states: Tensor = cast(Any, model).drafted_states(slot, shared)[0]  # [A, B-1, H]
    trained = shared.logits(states.to(shared.head.dtype)).float()  # [A, B-1, V]
    policy.start(1, slot.input_ids.shape[1] + policy.block_size)
    worst = scale = 0.0
    for place in slot.anchor_valid[0].nonzero()[:, 0].tolist():
        anchor = int(slot.anchors[0, place])
        positions = torch.arange(anchor, device=slot.input_ids.device)[None]
        policy.extend([f[:, :anchor] for f in slot.features], positions, torch.ones_like(positions, dtype=torch.bool))
        decoded = policy.draft_logits(slot.input_ids[:, anchor], slot.anchors[:, place])[0].float()
        worst = max(worst, float((decoded - trained[place]).abs().max()))
        scale = max(scale, float(decoded.abs().max()))
    detail = f"largest difference {worst:.1e} of logits up to {scale:.1f}"
    return Proof("training and decoding give the same block logits", worst <= TOLERANCE * max(scale, 1.0), detail)


@torch.no_grad()
def no_leak(model: nn.Module, slot: SlotBatch, shared: SharedWeights) -> Proof:
    """Proof 2: overwrite the features from an anchor on; blocks up to that anchor must not change by one bit."""
    before = model(slot, shared).clone()
    valid = slot.anchor_valid[0].nonzero()[:, 0].tolist()
    kept = [f.clone() for f in slot.features]
    leaks = 0
    for place in valid[:: max(1, len(valid) // 8)]:
        anchor = int(slot.anchors[0, place])
        for feature in slot.features:
            feature[:, anchor:] = torch.randn_like(feature[:, anchor:]) * 10
        after = model(slot, shared)
        leaks += not torch.equal(before[0, : place + 1], after[0, : place + 1])
        for feature, original in zip(slot.features, kept, strict=True):
            feature.copy_(original)
    return Proof("no block sees features at or after its anchor", leaks == 0, f"{leaks} of {min(len(valid), 8)} leak")


def captured(target: Target, input_ids: Tensor) -> Proof:
    """Proof 3: our packed forward against the library's own attention and hidden states."""
    found = prove_capture(target, input_ids)
    exact = target.precision not in EXACT or max(*found.taps, found.logits) < TOLERANCE
    detail = (
        f"features differ by {max(found.taps):.1e}, a neighbouring layer's by {min(found.neighbours):.1e}; "
        f"logits rebuilt from the last state by {found.logits:.1e}"
    )
    return Proof("captured features are the target's own", found.holds and exact, detail)


def lossless(check: GreedyCheck) -> Proof:
    """Proof 4, from answers that have been decoded both ways."""
    passed = check.different == 0 and (check.dtype not in EXACT or check.identical == check.prompts)
    detail = f"{check.identical} of {check.prompts} answers identical in {check.dtype}"
    return Proof("speculative output equals plain greedy output", passed, detail)


def one_document(ids: list[int], mask: list[bool], num_anchors: int) -> MicroBatch:
    """A micro-batch of one row with one document, anchors spread evenly over its eligible positions."""
    eligible = [i for i in range(len(ids) - 1) if mask[i] and mask[i + 1]]
    chosen = sorted({eligible[i * len(eligible) // num_anchors] for i in range(num_anchors)})
    return make_document_batch(torch.tensor(ids), torch.tensor(mask), chosen, num_anchors)
