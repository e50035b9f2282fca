"""What other trainers do and helixctl does not: habits, one of which is put in for a run of `scripts/ablation.py`.

Decoding is never changed: where a habit makes training and serving differ, that is the point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from helixctl.data import anchors
from helixctl.models.drafters import _objective
from helixctl.models.drafters._layers import Rotary
from helixctl.models.drafters._objective import Chosen, Drafted
from helixctl.models.drafters.dflash import model
from helixctl.plan import Plan
from helixctl.training import build

Suspect = Callable[[Plan, ExitStack], None]
"""Puts a habit in until the stack is closed."""


def bf16_masters(_plan: Plan, stack: ExitStack) -> None:
    """Parameters, gradients and Adam's moments in bfloat16, without float32 masters (Automodel)."""
    original = build.build_drafter

    def rounded(plan: Plan, device: torch.device) -> nn.Module:
        return original(plan, device).bfloat16()

    stack.enter_context(patch.object(build, "build_drafter", rounded))


def bf16_rotary(_plan: Plan, stack: ExitStack) -> None:
    """Rotary frequencies rounded to bfloat16, as `module.to(bfloat16)` does to a buffer; serving has float32 ones."""

    def rounded(positions: Tensor, head_dim: int, theta: float) -> Rotary:
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        frequencies = torch.pow(theta, -exponents).bfloat16().float()
        angles = positions.float()[..., None, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    stack.enter_context(patch.object(model, "rotary_tables", rounded))


def whole_blocks(plan: Plan, stack: ExitStack) -> None:
    """No anchor whose block would reach over the end of its document (TorchSpec, Automodel)."""
    original, ahead = anchors.eligible_anchors, plan.recipe.drafter.block_size - 1

    def eligible(loss_mask: NDArray[np.bool_], document_ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        found = original(loss_mask, document_ids)
        found[-ahead:] = False
        found[:-ahead] &= document_ids[:-ahead] == document_ids[ahead:]
        return found

    stack.enter_context(patch.object(anchors, "eligible_anchors", eligible))


def per_document(_plan: Plan, stack: ExitStack) -> None:
    """Every document weighs the same, however many of its slots are supervised."""
    original = _objective.choose

    def choose(drafted: Drafted, loss: Any, *, training: bool) -> Chosen:
        chosen, slot, blocks = original(drafted, loss, training=training), drafted.slot, drafted.blocks
        rows, seq_len = slot.input_ids.shape
        document = slot.document_ids.gather(1, blocks.anchors).clamp_min(0).long()  # [R, A]
        document = document + torch.arange(rows, device=document.device)[:, None] * seq_len
        flat = drafted.computed(document[..., None].expand(blocks.ids.shape)).flatten()
        flat = flat if chosen.places is None else flat[chosen.places]
        sums = chosen.weights.new_zeros(rows * seq_len).index_add(0, flat, chosen.weights)
        return replace(chosen, weights=chosen.weights / sums[flat].clamp_min(torch.finfo(torch.float32).tiny))

    stack.enter_context(patch.object(_objective, "choose", choose))


SUSPECTS: dict[str, Suspect] = {
    "bf16-masters": bf16_masters,
    "bf16-rotary": bf16_rotary,
    "whole-blocks": whole_blocks,
    "per-document": per_document,
}


@contextmanager
def under_suspicion(name: str | None, plan: Plan) -> Iterator[None]:
    """The block trains with the habit called ``name``; None: as helixctl does."""
    with ExitStack() as stack:
        if name is not None:
            SUSPECTS[name](plan, stack)
        yield
