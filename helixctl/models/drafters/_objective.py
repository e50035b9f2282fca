"""The loss of drafted blocks: additive terms with one weight per slot, and block metrics.

Where only cross-entropy is wanted, ``_head.py`` computes it; everything else goes through ``_distill.py``.

Legend: R rows, S tokens per row, A anchors per row, n computed blocks, W slots per block, D drafted ones, H width,
m slots given to the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helixctl.data.batch import SlotBatch
from helixctl.models.drafters._blocks import Blocks, slot_weights
from helixctl.models.drafters._distill import Mix, SlotLosses, Teacher, slot_losses
from helixctl.models.drafters._head import Head, head_loss, make_head, sample_head
from helixctl.models.drafters._metrics import accepted_prefix
from helixctl.models.drafters._options import Loss
from helixctl.models.drafters._terms import LossTerms
from helixctl.models.shared import SharedWeights


@dataclass(frozen=True)
class Drafted:
    """States of the computed blocks, and what their loss needs beside them."""

    hidden: Tensor  # [n, W, H] final-normed
    index: Tensor | None  # [n] flat places among the R * A blocks; None: all of them
    blocks: Blocks
    slot: SlotBatch
    shared: SharedWeights
    seed: int
    """Of the class draw of this micro-batch."""

    def computed(self, x: Tensor) -> Tensor:
        """The drafted slots of ``x`` [R, A, W] for the computed blocks: [n, D]."""
        flat = x.flatten(0, 1)
        return (flat if self.index is None else flat[self.index])[:, self.blocks.first :]


@dataclass(frozen=True)
class Scored:
    """What the head said about the drafted slots of all computed blocks."""

    numerator: Tensor  # [] float32: sum of weight x loss, with gradient
    denominator: Tensor  # [] float32: sum of weights
    terms: dict[str, Tensor]
    """Sum of weight x term, unscaled, for every term of the loss; float32 scalars without gradient."""
    correct: Tensor  # [n, D] bool, False where not supervised
    supervised: Tensor  # [n, D] bool
    num_blocks: Tensor  # [] int64: valid blocks


@dataclass(frozen=True)
class Chosen:
    """The slots that meet the head, flat, and the classes to choose from."""

    states: Tensor  # [m, H]
    labels: Tensor  # [m] int64, places in the head
    weights: Tensor  # [m] float32
    head: Head
    classes: Tensor | None  # [C] int64 vocabulary ids of the head's classes; None: the vocabulary
    places: Tensor | None  # [m] int64 among the n * D slots; None: all of them


def train_terms(drafted: Drafted, loss: Loss) -> LossTerms:
    """Loss and additive metrics of a training micro-batch."""
    return as_terms(score(drafted, loss, training=True))


def validation_sums(drafted: Drafted, loss: Loss) -> dict[str, Tensor]:
    """Additive validation metrics, always over the full vocabulary: scalars, and ``*_k`` of [D] by slot."""
    return as_sums(score(drafted, loss, training=False))


def as_terms(scored: Scored) -> LossTerms:
    """What training adds up."""
    counts = {
        "correct": scored.correct.sum(),
        "count": scored.supervised.sum(),
        "prefix_sum": accepted_prefix(scored.correct, scored.supervised).sum(),
        "num_blocks": scored.num_blocks,
    }
    sums = {"loss_num": scored.numerator.detach(), "loss_den": scored.denominator, **scored.terms}
    return LossTerms(scored.numerator, scored.denominator, sums | {name: n.float() for name, n in counts.items()})


def as_sums(scored: Scored) -> dict[str, Tensor]:
    """What validation adds up."""
    return {
        "loss_num": scored.numerator,
        "loss_den": scored.denominator,
        **scored.terms,
        "correct_k": scored.correct.sum(0).float(),
        "count_k": scored.supervised.sum(0).float(),
        "prefix_sum": accepted_prefix(scored.correct, scored.supervised).sum().float(),
        "num_blocks": scored.num_blocks.float(),
    }


def score(drafted: Drafted, loss: Loss, *, training: bool) -> Scored:
    """Every term of ``loss`` on the drafted slots."""
    chosen = choose(drafted, loss, training=training)
    by_cross_entropy_alone = loss.position_weights == "decay" and not loss.needs_last_hidden
    if by_cross_entropy_alone:
        cross, right = head_loss(chosen.states, chosen.head, chosen.labels, chosen.weights)
        return scored_of(drafted, chosen, cross * loss.cross_entropy, (chosen.weights, {}, right))
    teacher = make_teacher(drafted, chosen) if loss.needs_last_hidden else None
    found = slot_losses(chosen.states, chosen.head, (chosen.labels, chosen.weights), mix_of(loss), teacher)
    weights, losses = chosen.weights, found.loss
    if loss.position_weights == "dpace":
        weights = dpace_weights(drafted, chosen, found.cross_entropy, loss.dpace_smoothing)
        losses = losses * weights
    return scored_of(drafted, chosen, losses.sum(), (weights, term_sums(found, weights, mix_of(loss)), found.correct))


def scored_of(
    drafted: Drafted, chosen: Chosen, numerator: Tensor, found: tuple[Tensor, dict[str, Tensor], Tensor]
) -> Scored:
    """``found``: weights [m], sums of the terms, correctness [m]."""
    weights, terms, right = found
    supervised = drafted.computed(drafted.blocks.supervised)
    return Scored(
        numerator=numerator,
        denominator=weights.sum(),
        terms=terms,
        correct=spread(right, chosen, supervised.shape) & supervised,
        supervised=supervised,
        num_blocks=drafted.blocks.valid.sum(),
    )


def choose(drafted: Drafted, loss: Loss, *, training: bool) -> Chosen:
    """Which slots meet the head: on a CPU the supervised ones, elsewhere all drafted ones."""
    blocks, hidden = drafted.blocks, drafted.hidden
    labels, supervised = drafted.computed(blocks.labels), drafted.computed(blocks.supervised)  # [n, D]
    gamma = loss.decay_gamma if loss.position_weights == "decay" else None
    weights = (supervised * slot_weights(supervised.shape[1] + 1, gamma, hidden.device)).flatten()
    states, flat_labels, places = hidden[:, blocks.first :].flatten(0, 1), labels.flatten(), None
    if hidden.device.type == "cpu" and not torch.compiler.is_dynamo_compiling():
        # Only a CPU leaves slots out: elsewhere counting them would wait for the device and change shapes.
        places = (weights > 0).nonzero().squeeze(1)  # [m]
        states, flat_labels, weights = states[places], flat_labels[places], weights[places]
    head, classes = make_head(drafted.shared), None
    if training and loss.sampled_classes is not None:
        head, flat_labels, classes = sample_head(head, flat_labels, loss.sampled_classes, drafted.seed)
    return Chosen(states, flat_labels, weights, head, classes, places)


def make_teacher(drafted: Drafted, chosen: Chosen) -> Teacher:
    """The target's normed states, and for every chosen slot the one in front of its label."""
    last, blocks = drafted.slot.last_hidden, drafted.blocks
    assert last is not None, "the plan captures the last hidden state for a loss that needs it"
    rows, seq_len, width = last.shape
    normed = drafted.shared.final_norm(last).detach().to(chosen.head.weight.dtype)  # [R, S, H]
    before = blocks.anchors[..., None] + torch.arange(blocks.size, device=last.device) + (blocks.shift - 1)
    place = before.clamp(0, seq_len - 1) + torch.arange(rows, device=last.device)[:, None, None] * seq_len  # [R, A, W]
    flat = drafted.computed(place).flatten()
    return Teacher(normed.view(-1, width), flat if chosen.places is None else flat[chosen.places])


def mix_of(loss: Loss) -> Mix:
    """The terms of ``loss``."""
    return Mix(loss.cross_entropy, loss.kl, loss.kl_temperature, loss.l1)


def term_sums(found: SlotLosses, weights: Tensor, mix: Mix) -> dict[str, Tensor]:
    """Sum of weight x term for every term that was computed."""
    terms = {"cross_entropy": found.cross_entropy}
    terms |= {"kl": found.kl} if mix.kl else {}
    terms |= {"l1": found.l1} if mix.has_l1 else {}
    return {f"term_{name}": (weights * value).sum() for name, value in terms.items()}


def dpace_weights(drafted: Drafted, chosen: Chosen, cross_entropy: Tensor, smoothing: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): how much the expected accepted length gains from each slot. [m], no gradient.

    w_j = sum over m >= j of the product over i <= m of q_i, with q the label's smoothed probability. Slots that are
    not supervised are passed over: they neither multiply nor add.
    """
    supervised = drafted.computed(drafted.blocks.supervised)  # [n, D]
    sure = spread(torch.exp(-cross_entropy), chosen, supervised.shape)
    sure = torch.where(supervised, (1.0 - smoothing) * sure + smoothing, 1.0)
    reach = sure.cumprod(dim=1) * supervised  # expected that the prefix up to here is accepted
    weights = reach.flip(1).cumsum(dim=1).flip(1) * supervised
    flat = weights.flatten()
    return flat if chosen.places is None else flat[chosen.places]


def spread(values: Tensor, chosen: Chosen, shape: torch.Size) -> Tensor:
    """Values [m] of the chosen slots at their places in [n, D], zeros elsewhere."""
    if chosen.places is None:
        return values.view(shape)
    return values.new_zeros(shape).flatten().index_copy(0, chosen.places, values).view(shape)
