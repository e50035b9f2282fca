"""The DFlash objective: hard cross-entropy with position decay on slots 1..B-1, and block metrics.

Legend: R rows, A anchors per row, n computed blocks, B block size, H width, m slots given to the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helixctl.models.drafters._blocks import Blocks, slot_weights
from helixctl.models.drafters._head import Head, head_loss, make_head, sample_head
from helixctl.models.drafters._metrics import accepted_prefix
from helixctl.models.drafters._terms import LossTerms
from helixctl.models.drafters.dflash.options import Loss
from helixctl.models.shared import SharedWeights


@dataclass(frozen=True)
class Scored:
    """What the head said about the drafted slots of all computed blocks."""

    numerator: Tensor  # [] float32: sum of weight x cross-entropy, with gradient
    denominator: Tensor  # [] float32: sum of weights
    correct: Tensor  # [n, B-1] bool, False where not supervised
    supervised: Tensor  # [n, B-1] bool
    num_blocks: Tensor  # [] int64: valid blocks


def train_terms(
    hidden: Tensor, index: Tensor | None, blocks: Blocks, shared: SharedWeights, loss: Loss, seed: int
) -> LossTerms:
    """Loss and additive metrics of a training micro-batch.

    Args:
        hidden: [n, B, H] final-normed states of the computed blocks.
        index: Their flat places among the R * A blocks; None: all of them.
        blocks: All blocks.
        shared: Head of the target.
        loss: What to train on.
        seed: Of the class draw of this micro-batch.
    """
    scored = _score(hidden, index, blocks, make_head(shared), (loss, seed if loss.sampled_classes else None))
    numerator = scored.numerator * loss.cross_entropy
    counts = {
        "correct": scored.correct.sum(),
        "count": scored.supervised.sum(),
        "prefix_sum": accepted_prefix(scored.correct, scored.supervised).sum(),
        "num_blocks": scored.num_blocks,
    }
    sums = {"loss_num": numerator.detach(), "loss_den": scored.denominator}
    return LossTerms(numerator, scored.denominator, sums | {name: count.float() for name, count in counts.items()})


def validation_sums(
    hidden: Tensor, index: Tensor | None, blocks: Blocks, shared: SharedWeights, loss: Loss
) -> dict[str, Tensor]:
    """Additive validation metrics, always over the full vocabulary: scalars, and ``*_k`` of [B-1] by slot."""
    scored = _score(hidden, index, blocks, make_head(shared), (loss, None))
    return {
        "loss_num": scored.numerator * loss.cross_entropy,
        "loss_den": scored.denominator,
        "correct_k": scored.correct.sum(0).float(),
        "count_k": scored.supervised.sum(0).float(),
        "prefix_sum": accepted_prefix(scored.correct, scored.supervised).sum().float(),
        "num_blocks": scored.num_blocks.float(),
    }


def _score(hidden: Tensor, index: Tensor | None, blocks: Blocks, head: Head, how: tuple[Loss, int | None]) -> Scored:
    loss, sample_seed = how
    labels, supervised = (_computed(t, index)[:, 1:] for t in (blocks.labels, blocks.supervised))  # [n, B-1]
    weights = supervised * slot_weights(blocks.size, loss.decay_gamma, hidden.device)
    states, chosen = hidden[:, 1:].flatten(0, 1), None  # slot 0 never meets the head
    flat_labels, flat_weights = labels.flatten(), weights.flatten()
    if hidden.device.type == "cpu" and not torch.compiler.is_dynamo_compiling():
        # Only a CPU leaves slots out: elsewhere counting them would wait for the device and change shapes.
        chosen = (flat_weights > 0).nonzero().squeeze(1)  # [m]
        states, flat_labels, flat_weights = states[chosen], flat_labels[chosen], flat_weights[chosen]
    if sample_seed is not None and loss.sampled_classes is not None:
        head, flat_labels = sample_head(head, flat_labels, loss.sampled_classes, sample_seed)
    numerator, right = head_loss(states, head, flat_labels, flat_weights)
    if chosen is not None:
        right = torch.zeros_like(supervised).flatten().index_copy(0, chosen, right)
    return Scored(
        numerator=numerator,
        denominator=flat_weights.sum(),
        correct=right.view(supervised.shape) & supervised,
        supervised=supervised,
        num_blocks=blocks.valid.sum(),
    )


def _computed(x: Tensor, index: Tensor | None) -> Tensor:
    """[R, A, B] to the computed blocks [n, B]."""
    flat = x.flatten(0, 1)
    return flat if index is None else flat[index]
