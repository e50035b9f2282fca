"""The frozen head and its cross-entropy, in chunks, with the gradient computed in the forward pass.

Full logits never exist: each chunk's logits become their own gradient in place and are multiplied back to the width
of the hidden state at once, so backward is one scaling. The head itself has no gradient.

Legend: n slots, C classes (the vocabulary, or a sample of it), H width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from helixctl.models.drafters._layers import compute_dtype
from helixctl.models.private import compiled_here
from helixctl.models.shared import SharedWeights

GPU_CHUNK_ROWS = 4096
"""Slots per product with the head on a GPU: enough for full speed, little memory beside the layers."""
CPU_CHUNK_ROWS = 512
"""The same on a CPU."""
CPU_SOFTMAX_SCORES = 16 * 49_152
"""float32 scores whose softmax is computed together on a CPU: so many stay in its cache."""


@dataclass(frozen=True)
class Head:
    """The classes to choose from, in the compute type."""

    weight: Tensor  # [C, H]
    bias: Tensor | None  # [C]
    softcap: float | None
    correction: Tensor | None = None  # [C] float32, added to the logits inside the softmax only


def softmax_rows(num_classes: int) -> int:
    """Slots whose float32 softmax is computed together on a CPU."""
    return max(1, CPU_SOFTMAX_SCORES // num_classes)


def make_head(shared: SharedWeights) -> Head:
    """The full vocabulary in the compute type; free where the target already has that type."""
    weight = shared.head.to(compute_dtype(shared.head))
    return Head(weight, shared.head_bias, shared.logit_softcap)


def sample_head(head: Head, labels: Tensor, num_sampled: int, seed: int) -> tuple[Head, Tensor, Tensor]:
    """A head over the labels' own classes plus at least ``num_sampled`` others, drawn uniformly from the rest.

    A drawn class stands for rest / drawn classes, so log(rest / drawn) is added to its logit inside the softmax: the
    sum over the vocabulary is then right in expectation. The number of classes is n + num_sampled whatever the
    labels, so shapes are fixed and the device is not waited for.

    Args:
        head: The full head, C = V.
        labels: [n] int64 class ids.
        num_sampled: Least number of classes drawn beside the labels.
        seed: Of this draw; the same seed draws the same classes.

    Returns:
        The smaller head, the labels as places in it, and the class ids that it has.
    """
    vocab_size = head.weight.shape[0]
    num_classes = min(vocab_size, labels.numel() + num_sampled)
    generator, pinned = torch.Generator().manual_seed(seed), labels.is_cuda  # from other memory, the copy would wait
    keys = torch.rand(vocab_size, generator=generator, pin_memory=pinned).to(labels.device, non_blocking=True)
    wanted = torch.zeros_like(keys).index_fill_(0, labels, 2.0)
    classes = (keys + wanted).topk(num_classes).indices.sort().values  # labels first, the rest at random
    is_label = wanted[classes] > 0
    rest = vocab_size - is_label.sum()
    drawn = (num_classes - is_label.sum()).clamp(min=1)
    correction = torch.where(is_label, 0.0, torch.log(rest.float() / drawn.float()))
    bias = None if head.bias is None else head.bias[classes]
    small = replace(head, weight=head.weight[classes], bias=bias, correction=correction)
    return small, torch.searchsorted(classes, labels), classes


def head_loss(hidden: Tensor, head: Head, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies, and which slots are predicted right.

    Args:
        hidden: [n, H] final-normed states.
        head: Classes.
        labels: [n] int64 in [0, C).
        weights: [n] float32; 0 for slots that do not count.

    Returns:
        sum(weights * cross-entropy), float32 scalar with a gradient for ``hidden``; and [n] bool.
    """
    # torch gives `apply` no types.
    numerator, correct = _HeadLoss.apply(hidden, head, labels, weights, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return numerator, correct


def head_logits(hidden: Tensor, head: Head) -> Tensor:
    """Logits [..., C] in the compute type, bias and softcap applied. For decoding, where few rows are asked for."""
    flat = hidden.to(head.weight.dtype).reshape(-1, hidden.shape[-1])  # copies what is not contiguous: a strided 3-D
    logits = (flat @ head.weight.t()).view(*hidden.shape[:-1], -1)  # operand took 2,279 ms in place of 15 on a CPU
    if head.bias is not None:
        logits = logits + head.bias.to(logits.dtype)
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        hidden, head, labels, weights, with_grad = inputs
        device = hidden.device.type
        chunk_rows = CPU_CHUNK_ROWS if device == "cpu" else GPU_CHUNK_ROWS
        chunk_loss = chunk_loss_for(device)
        numerator, correct, grads = hidden.new_zeros((), dtype=torch.float32), [], []
        with torch.autocast(device, enabled=False):
            for i in range(0, hidden.shape[0], chunk_rows):
                part = slice(i, i + chunk_rows)
                logits = hidden[part].to(head.weight.dtype) @ head.weight.t()  # [chunk, C]
                loss, right, grad = chunk_loss(logits, head, labels[part], weights[part], with_grad)
                numerator = numerator + loss
                correct.append(right)
                if with_grad:
                    grads.append(grad @ head.weight)
                del logits, grad  # or two chunks would live at once
        right = torch.cat(correct) if correct else labels.new_zeros(0, dtype=torch.bool)
        ctx.mark_non_differentiable(right)
        ctx.save_for_backward(torch.cat(grads) if grads else torch.zeros_like(hidden))
        ctx.hidden_dtype = hidden.dtype
        return numerator, right

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = ctx.saved_tensors
        return (grad * grads[0]).to(ctx.hidden_dtype), None, None, None, None


def _softmax(
    logits: Tensor, head: Head, labels: Tensor, weights: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [], correctness [chunk] and gradient by ``logits`` [chunk, C] (compute type; empty without gradient).

    Works in place on one float32 copy of the logits: on a CPU, fresh memory costs more than the arithmetic.
    """
    scores = logits.to(torch.float32, copy=True)
    if head.bias is not None:
        scores.add_(head.bias)
    slope = None
    if head.softcap is not None:
        scores.div_(head.softcap).tanh_()
        slope = 1.0 - scores.square() if with_grad else None
        scores.mul_(head.softcap)
    top, best = scores.max(dim=1)
    if head.correction is not None:
        scores.add_(head.correction)
    index = labels[:, None]
    scores.sub_(top[:, None])
    label_scores = scores.gather(1, index).squeeze(1)
    total = scores.exp_().sum(dim=1)
    loss = (weights * (total.log() - label_scores)).sum()
    if not with_grad:
        return loss, best == labels, logits.new_empty(0)
    scores.mul_((weights / total)[:, None])
    scores.scatter_add_(1, index, -weights[:, None])
    if slope is not None:
        scores.mul_(slope)
    return loss, best == labels, scores.to(logits.dtype)


def _softmax_by_rows(
    logits: Tensor, head: Head, labels: Tensor, weights: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``_softmax`` a few rows at a time, so that float32 scores stay in the cache; overwrites ``logits``."""
    loss, correct = weights.new_zeros(()), []
    rows = softmax_rows(logits.shape[1])
    for i in range(0, logits.shape[0], rows):
        part = slice(i, i + rows)
        part_loss, right, grad = _softmax(logits[part], head, labels[part], weights[part], with_grad)
        loss = loss + part_loss
        correct.append(right)
        if with_grad:
            logits[part] = grad
    return loss, torch.cat(correct), logits


def chunk_loss_for(device: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The fastest way to turn a chunk of logits into loss, correctness and gradient; see ``_softmax``."""
    if torch.compiler.is_dynamo_compiling():
        return _softmax
    return _softmax_by_rows if device == "cpu" else compiled_here(_softmax)
