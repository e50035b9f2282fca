"""The head of a causal LM that is being trained and its cross-entropy, in chunks, gradients computed in the forward.

Full logits never exist: each chunk's logits become their own gradient, which is multiplied at once back to the width of
the hidden state and into the gradient of the head. Backward is a scaling. The gradient of a tied head joins that of the
embedding in autograd.

Legend: n tokens, V vocabulary, H width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from helixctl.models.drafters import _head


def trained_head_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies, and which tokens are predicted right.

    Products are computed in autocast's type where it is on, else in the type of ``weight``; the gradient of the head is
    added up over the chunks in the type of ``weight``.

    Args:
        hidden: [n, H] states after the final norm.
        weight: [V, H] of the head.
        bias: [V] of the head, or None.
        softcap: logits become softcap * tanh(logits / softcap).
        labels: [n] int64 in [0, V).
        weights: [n] float32; 0 for tokens that do not count.

    Returns:
        sum(weights * cross-entropy), a float32 scalar with gradients for ``hidden``, ``weight`` and ``bias``; and [n]
        bool.
    """
    # torch gives `apply` no types.
    found: tuple[Tensor, Tensor] = _TrainedHeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, softcap, labels, weights, torch.is_grad_enabled()
    )
    return found


class _TrainedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, softcap, labels, weights, with_grad = inputs
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        head = _head.Head(weight.to(dtype), bias, softcap)
        size = _head.CPU_CHUNK_ROWS if device == "cpu" else _head.GPU_CHUNK_ROWS
        loss_of = _head.chunk_loss_for(device)
        numerator, correct = hidden.new_zeros((), dtype=torch.float32), []
        grads = _Gradients(hidden, weight, bias) if with_grad else None
        with torch.autocast(device, enabled=False):
            for i in range(0, hidden.shape[0], size):
                part = slice(i, i + size)
                states = hidden[part].to(dtype)
                logits = states @ head.weight.t()  # [chunk, V]
                loss, right, grad = loss_of(logits, head, labels[part], weights[part], with_grad)
                numerator = numerator + loss
                correct.append(right)
                if grads is not None:
                    grads.add(part, grad, states, head.weight)
                del logits, grad  # or two chunks would live at once
        found = torch.cat(correct) if correct else labels.new_zeros(0, dtype=torch.bool)
        ctx.mark_non_differentiable(found)
        ctx.grads = grads
        return numerator, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("the gradients of this loss have been used: backward runs once per forward")
        return (*grads.scaled(outer[0]), None, None, None, None)


class _Gradients:
    """Of hidden [n, H], weight [V, H] and bias [V], filled chunk by chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._hidden = torch.empty_like(hidden)
        self._weight = torch.zeros_like(weight)
        self._bias = None if bias is None else torch.zeros_like(bias)

    def add(self, part: slice, grad: Tensor, states: Tensor, weight: Tensor) -> None:
        """One chunk: gradient by its logits [chunk, V], its states [chunk, H], the head [V, H] in the compute type."""
        self._hidden[part] = grad @ weight
        if grad.dtype == self._weight.dtype:
            self._weight.addmm_(grad.t(), states)
        else:
            self._weight.add_(grad.t() @ states)
        if self._bias is not None:
            self._bias.add_(grad.sum(0, dtype=torch.float32))

    def scaled(self, factor: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """All of them times the gradient of the loss; in place, so once."""
        bias = None if self._bias is None else self._bias.mul_(factor)
        return self._hidden.mul_(factor), self._weight.mul_(factor), bias
