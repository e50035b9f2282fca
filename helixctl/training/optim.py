"""AdamW on float32 masters, the learning-rate schedule, and one optimizer step over summed gradients.

Gradients arrive as sums of weighted losses; the step divides by the summed weights, so accumulation, several
drafters and several processes take the same step. A step whose gradient norm is not finite, or in which nothing is
supervised, changes nothing: neither parameters nor Adam's moments and step counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from helixctl.recipe.schema import ScheduleOptions, StepOptions


def learning_rate_scale(step: int, total_steps: int, options: ScheduleOptions) -> float:
    """Share of the peak learning rate used by optimizer step ``step`` (the first is 0).

    Rises linearly over the warm-up and reaches the peak at its end; then follows the schedule down towards
    ``min_lr_ratio``, which step ``total_steps`` would reach.
    """
    warmup = options.warmup_of(total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return options.min_lr_ratio + (1.0 - options.min_lr_ratio) * _shape(done, options)


def _shape(done: float, options: ScheduleOptions) -> float:
    if options.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if options.schedule == "linear":
        return 1.0 - done
    if options.schedule == "wsd":
        held = 1.0 - options.decay_ratio
        return 1.0 if done <= held or options.decay_ratio == 0.0 else (1.0 - done) / options.decay_ratio
    return 1.0


def make_optimizer(model: nn.Module, options: StepOptions) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors (norms, biases) and embeddings are not decayed.

    The learning rate is given to every step. A head that is tied to the embedding is the embedding.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2 and id(p) not in tables]
    others = [p for p in trainable if p.ndim < 2 or id(p) in tables]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=options.betas, fused=True)


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did; tensors stay on the device until somebody flushes them."""

    grad_norm: Tensor  # scalar float32, of the mean gradient, before clipping
    finite: Tensor  # scalar bool
    taken: Tensor  # scalar bool; False: the step was skipped, as it was not finite or its denominator was 0
    learning_rate: float


def take_step(
    optimizer: torch.optim.AdamW, denominator: Tensor, learning_rate: float, max_grad_norm: float
) -> StepOutcome:
    """Divide the summed gradients by ``denominator``, clip, step, and clear the gradients.

    Never waits for the device: that there is nothing to take, or nothing finite, reaches the fused kernel as its
    ``found_inf`` flag, which leaves parameters, moments and step counts alone. The sums are those of all drafters of
    all processes, so all decide alike.
    """
    grads = [p.grad for p in _parameters(optimizer) if p.grad is not None]
    scale = 1.0 / denominator.clamp_min(torch.finfo(torch.float32).tiny)
    norm = torch.nn.utils.get_total_norm(grads) * scale
    finite = torch.isfinite(norm)
    taken = finite & (denominator > 0)
    clip = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, scale * clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # Looked for by step(), declared nowhere.
    optimizer.found_inf = (~taken).float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return StepOutcome(norm, finite, taken, learning_rate)


def gradients(optimizer: torch.optim.AdamW) -> list[Tensor]:
    """Every gradient in a fixed order, allocated as zeros where backward has not run yet."""
    found = []
    for parameter in _parameters(optimizer):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found.append(parameter.grad)
    return found


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Moments and step counts under ``<parameter>.<moment>``, for a checkpoint."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW, tensors: dict[str, Tensor]) -> None:
    """Put back what ``optimizer_tensors`` returned, bit for bit."""
    for name, parameter in model.named_parameters():
        keys = [k for k in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{k}" in tensors]
        if keys:  # a frozen parameter has none
            optimizer.state[parameter] = {k: tensors[f"{name}.{k}"].to(parameter.device) for k in keys}


def clear_moments(optimizer: torch.optim.AdamW) -> None:
    """Moments and step counts begin at zero again, at their own addresses; nothing waits for the device."""
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def make_moments(model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Allocate moments and step counts as zeros, for values that come from elsewhere."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            zero = torch.zeros((), device=parameter.device)
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": zero, **moments}


def _parameters(optimizer: torch.optim.AdamW) -> Iterable[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
