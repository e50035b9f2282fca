"""The DSpark objective: cross-entropy, distance and confidence, with the row's own tokens before each slot.

Legend: R rows, A anchors per row, n computed blocks, W slots per block, H width, m slots given to the head, C classes,
r rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from helixctl.models.drafters._distill import LowRank, slot_losses
from helixctl.models.drafters._objective import (
    Chosen,
    Drafted,
    Scored,
    as_sums,
    as_terms,
    choose,
    make_teacher,
    mix_of,
    scored_of,
    term_sums,
)
from helixctl.models.drafters._terms import LossTerms
from helixctl.models.drafters.dspark.heads import ConfidenceHead, MarkovHead
from helixctl.models.drafters.dspark.options import Loss

if TYPE_CHECKING:
    from helixctl.models.drafters.dflash.model import DFlashDraftModel


def train_terms(drafted: Drafted, model: DFlashDraftModel) -> LossTerms:
    """Loss and additive metrics of a training micro-batch."""
    return as_terms(_score(drafted, model, training=True))


def validation_sums(drafted: Drafted, model: DFlashDraftModel) -> dict[str, Tensor]:
    """Additive validation metrics, always over the full vocabulary."""
    return as_sums(_score(drafted, model, training=False))


def _score(drafted: Drafted, model: DFlashDraftModel, *, training: bool) -> Scored:
    loss, markov, confidence = model.options.loss, model.markov_head, model.confidence_head
    assert isinstance(loss, Loss) and isinstance(markov, MarkovHead) and isinstance(confidence, ConfidenceHead)
    chosen = choose(drafted, loss, training=training)
    left = markov(_previous(drafted, chosen))  # [m, r]
    right = markov.markov_w2.weight if chosen.classes is None else markov.markov_w2.weight[chosen.classes]
    teacher = make_teacher(drafted, chosen) if loss.needs_last_hidden else None
    mix = replace(mix_of(loss), measure_l1=loss.confidence > 0)
    targets = (chosen.labels, chosen.weights)
    found = slot_losses(chosen.states, chosen.head, targets, mix, teacher, LowRank(left, right))
    numerator, terms = found.loss.sum(), term_sums(found, chosen.weights, mix)
    if loss.confidence > 0:
        accepted = (1.0 - 0.5 * found.l1).clamp(0.0, 1.0)
        sure = confidence(chosen.states, left)
        term = (chosen.weights * F.binary_cross_entropy_with_logits(sure, accepted, reduction="none")).sum()
        numerator = numerator + loss.confidence * term
        terms["term_confidence"] = term.detach()
        terms["term_confidence_error"] = (chosen.weights * (sure.detach().sigmoid() - accepted).abs()).sum()
    return scored_of(drafted, chosen, numerator, (chosen.weights, terms, found.correct))


def _previous(drafted: Drafted, chosen: Chosen) -> Tensor:
    """The row's own token in each chosen slot's place, which stands before its label: [m] int64."""
    blocks, ids = drafted.blocks, drafted.slot.input_ids
    place = blocks.anchors[..., None] + torch.arange(blocks.size, device=ids.device)  # [R, A, W]
    tokens = ids.gather(1, place.clamp(max=ids.shape[1] - 1).flatten(1)).view(place.shape)
    flat = drafted.computed(tokens).flatten()
    return flat if chosen.places is None else flat[chosen.places]
