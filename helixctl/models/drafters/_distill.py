"""Losses slot by slot against labels and against the target's distribution, one pass over the drafter's logits.

As in ``_head.py`` full logits never exist: each chunk's logits become their own gradient and are multiplied back at
once. The target's logits of the same slots are recomputed beside them, from its last hidden state through its own final
norm and head. The logits may have a low-rank part beside the head, whose factors are trained.

Legend: n slots, c slots of a chunk, C classes, H width, T target states, r rank.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helixctl.models.drafters import _head
from helixctl.models.drafters._head import Head
from helixctl.models.private import compiled_here


@dataclass(frozen=True)
class Mix:
    """Weights of the terms; a term of weight 0 is not computed, cross-entropy always is."""

    cross_entropy: float = 1.0
    kl: float = 0.0
    kl_temperature: float = 1.0
    l1: float = 0.0
    measure_l1: bool = False
    """Compute the distance of the probabilities even where its weight is 0."""

    @property
    def has_l1(self) -> bool:
        """Whether the distance of the probabilities is computed."""
        return self.l1 > 0 or self.measure_l1


@dataclass(frozen=True)
class Teacher:
    """The target's states, normed, and which of them predicts each slot's label."""

    states: Tensor  # [T, H] in the head's type
    rows: Tensor  # [n] int64 in [0, T)


@dataclass(frozen=True)
class LowRank:
    """A trained part of the logits, ``left @ right.T``."""

    left: Tensor  # [n, r]
    right: Tensor  # [C, r]


@dataclass(frozen=True)
class SlotLosses:
    """What each slot costs; only ``loss`` has a gradient."""

    loss: Tensor  # [n] float32: weight x mix of the terms
    cross_entropy: Tensor  # [n] float32, unweighted
    kl: Tensor  # [n] float32, unweighted; zeros where not computed
    l1: Tensor  # [n] float32, unweighted; zeros where not computed
    correct: Tensor  # [n] bool


@dataclass(frozen=True)
class _Job:
    """Everything that has no gradient."""

    head: Head
    labels: Tensor
    weights: Tensor
    teacher: Teacher | None
    mix: Mix
    with_grad: bool


@dataclass(frozen=True)
class _Part:
    """A chunk's labels and weights, and what its logits are judged by."""

    head: Head
    labels: Tensor  # [c]
    weights: Tensor  # [c]
    mix: Mix
    with_grad: bool


def slot_losses(
    hidden: Tensor,
    head: Head,
    targets: tuple[Tensor, Tensor],
    mix: Mix,
    teacher: Teacher | None = None,
    low_rank: LowRank | None = None,
) -> SlotLosses:
    """Losses of ``hidden`` [n, H] slot by slot.

    Gradients are kept in the compute type, so weights belong inside; a further weight of each slot may multiply
    ``loss``, unless there is a low-rank part: its right factor then needs the same one for all slots.

    Args:
        hidden: Final-normed states of the drafter.
        head: Classes.
        targets: Labels [n] int64 in [0, C), and weights [n] float32, 0 for slots that do not count.
        mix: Which terms, and how much of each.
        teacher: The target's states; needed for ``kl`` and ``l1``.
        low_rank: Factors of the trained part of the logits.
    """
    assert teacher is not None or not (mix.kl or mix.has_l1), "the divergence needs the target's states"
    job = _Job(head, *targets, teacher, mix, torch.is_grad_enabled())
    left, right = (None, None) if low_rank is None else (low_rank.left, low_rank.right)
    # torch gives `apply` no types.
    return SlotLosses(*_SlotLosses.apply(hidden, left, right, job))  # type: ignore[no-untyped-call]


class _SlotLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        hidden, left, right, job = inputs
        device = hidden.device.type
        chunk_rows = _head.CPU_CHUNK_ROWS if device == "cpu" else _head.GPU_CHUNK_ROWS
        kept = _Gradients.empty(hidden, left, right, job)
        judged: list[tuple[Tensor, ...]] = []
        with torch.autocast(device, enabled=False):
            for i in range(0, hidden.shape[0], chunk_rows):
                part = slice(i, i + chunk_rows)
                own, other = _logits(job, kept, part)
                share = _Part(job.head, job.labels[part], job.weights[part], job.mix, job.with_grad)
                *values, grad = _compare_for(device)(own, other, share)
                judged.append(tuple(values))
                if job.with_grad:
                    kept.add(grad, part)
                del own, other, grad  # or two chunks would live at once
        columns = [torch.cat(column) for column in zip(*judged, strict=True)] if judged else _nothing(job.weights)
        ctx.mark_non_differentiable(*columns[1:])
        ctx.save_for_backward(*kept.saved(job.with_grad))
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, left, right)]
        return tuple(columns)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scale = grads[0]  # [n]
        rows, left, right = (*ctx.saved_tensors, None, None)[:3]
        found = [(rows * scale[:, None]).to(ctx.dtypes[0])]
        if left is None:
            return (*found, None, None, None)
        found.append((left * scale[:, None]).to(ctx.dtypes[1]))
        found.append((right * scale[:1]).to(ctx.dtypes[2]))  # the same for all slots: see slot_losses
        return (*found, None)


@dataclass
class _Gradients:
    """Factors of the logits in the compute type, and the gradients that chunks leave."""

    hidden: Tensor
    left: Tensor | None
    right: Tensor | None
    weight: Tensor  # [C, H]
    rows: list[Tensor]
    left_rows: list[Tensor]
    right_sum: Tensor | None  # [C, r] float32: chunks add up

    @classmethod
    def empty(cls, hidden: Tensor, left: Tensor | None, right: Tensor | None, job: _Job) -> _Gradients:
        dtype = job.head.weight.dtype
        if left is None or right is None:
            return cls(hidden.to(dtype), None, None, job.head.weight, [], [], None)
        total = torch.zeros_like(right, dtype=torch.float32)
        return cls(hidden.to(dtype), left.to(dtype), right.to(dtype), job.head.weight, [], [], total)

    def add(self, grad: Tensor, part: slice) -> None:
        """``grad`` [c, C] by the logits of the slots in ``part``."""
        self.rows.append(grad @ self.weight)
        if self.left is not None and self.right is not None and self.right_sum is not None:
            self.left_rows.append(grad @ self.right)
            self.right_sum = self.right_sum + grad.t() @ self.left[part]

    def saved(self, with_grad: bool) -> list[Tensor]:
        """For backward: by hidden, and by the low-rank factors where there are some."""
        if not with_grad:
            return []
        saved = [torch.cat(self.rows) if self.rows else torch.zeros_like(self.hidden)]
        if self.left is not None and self.right_sum is not None:
            saved.append(torch.cat(self.left_rows) if self.left_rows else torch.zeros_like(self.left))
            saved.append(self.right_sum)
        return saved


def _logits(job: _Job, kept: _Gradients, part: slice) -> tuple[Tensor, Tensor | None]:
    """Raw products [c, C] of the drafter and of the target."""
    own = kept.hidden[part] @ kept.weight.t()
    if kept.left is not None and kept.right is not None:
        own.addmm_(kept.left[part], kept.right.t())
    if job.teacher is None:
        return own, None
    return own, job.teacher.states[job.teacher.rows[part]] @ kept.weight.t()


def _compare(own: Tensor, other: Tensor | None, part: _Part) -> tuple[Tensor, ...]:
    """Loss, cross-entropy, divergence, distance, correctness [c] each, and the gradient by ``own`` [c, C].

    The gradient is in the compute type, and empty without one.
    """
    mix, index = part.mix, part.labels[:, None]
    scores, slope = _scores(own, part.head)
    best = scores.argmax(dim=1)
    log_q = _log_softmax(scores, part.head.correction, 1.0)
    cross = -log_q.gather(1, index).squeeze(1)
    kl = l1 = torch.zeros_like(cross)
    by_scores: list[Tensor] = []
    if part.with_grad and mix.cross_entropy:
        label = torch.arange(own.shape[1], device=own.device) == index  # compared, not scattered: fuses on a GPU
        by_scores.append(mix.cross_entropy * (log_q.exp() - label.float()))
    if other is not None:
        goal, _ = _scores(other, part.head)
        if mix.kl:
            kl = _divergence(scores, goal, part, by_scores)
        if mix.has_l1:
            l1 = _distance(log_q.exp(), goal, part, by_scores)
    loss = part.weights * (mix.cross_entropy * cross + mix.kl * kl + mix.l1 * l1)
    if not by_scores:
        return loss, cross, kl, l1, best == part.labels, own.new_empty(0)
    grad = functools.reduce(operator.add, by_scores) * part.weights[:, None]
    return loss, cross, kl, l1, best == part.labels, (grad if slope is None else grad * slope).to(own.dtype)


def _scores(logits: Tensor, head: Head) -> tuple[Tensor, Tensor | None]:
    """Float32 logits with bias and softcap, and the softcap's slope."""
    scores = logits.float()
    if head.bias is not None:
        scores = scores + head.bias
    if head.softcap is None:
        return scores, None
    bent = torch.tanh(scores / head.softcap)
    return bent * head.softcap, 1.0 - bent.square()


def _log_softmax(scores: Tensor, correction: Tensor | None, temperature: float) -> Tensor:
    scores = scores if temperature == 1.0 else scores / temperature
    return torch.log_softmax(scores if correction is None else scores + correction, dim=1)


def _divergence(scores: Tensor, goal: Tensor, part: _Part, by_scores: list[Tensor]) -> Tensor:
    """T^2 x KL(target || drafter) [c] at temperature T; its weighted gradient joins ``by_scores``."""
    heat, correction = part.mix.kl_temperature, part.head.correction
    log_q, log_p = (_log_softmax(side, correction, heat) for side in (scores, goal))
    p = log_p.exp()
    if part.with_grad:
        by_scores.append((part.mix.kl * heat) * (log_q.exp() - p))
    return heat * heat * (p * (log_p - log_q)).sum(dim=1)


def _distance(q: Tensor, goal: Tensor, part: _Part, by_scores: list[Tensor]) -> Tensor:
    """Sum of |target - drafter| [c]; its weighted gradient by the drafter's scores joins ``by_scores``."""
    apart = q - _log_softmax(goal, part.head.correction, 1.0).exp()
    if part.with_grad and part.mix.l1:
        sign = torch.sign(apart)
        by_scores.append(part.mix.l1 * q * (sign - (q * sign).sum(dim=1, keepdim=True)))
    return apart.abs().sum(dim=1)


def _compare_by_rows(own: Tensor, other: Tensor | None, part: _Part) -> tuple[Tensor, ...]:
    """``_compare`` a few rows at a time, so that float32 scores stay in a CPU's cache; overwrites ``own``."""
    judged = []
    num_rows = _head.softmax_rows(own.shape[1])
    for i in range(0, own.shape[0], num_rows):
        rows = slice(i, i + num_rows)
        few = _Part(part.head, part.labels[rows], part.weights[rows], part.mix, part.with_grad)
        *values, grad = _compare(own[rows], None if other is None else other[rows], few)
        judged.append(values)
        if part.with_grad:
            own[rows] = grad
    return (*(torch.cat(column) for column in zip(*judged, strict=True)), own)


def _compare_for(device: str) -> Callable[..., tuple[Tensor, ...]]:
    if torch.compiler.is_dynamo_compiling():
        return _compare
    return _compare_by_rows if device == "cpu" else compiled_here(_compare)


def _nothing(weights: Tensor) -> list[Tensor]:
    empty = weights.new_zeros(0)
    return [empty, empty.clone(), empty.clone(), empty.clone(), torch.zeros_like(empty, dtype=torch.bool)]
