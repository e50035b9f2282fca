"""From a slot to blocks: what each block reads, predicts, and how much each slot of it weighs.

Legend: R rows, S tokens per row, A anchors per row, W slots per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helixctl.data.batch import SlotBatch


@dataclass(frozen=True)
class Blocks:
    """All blocks of a micro-batch, at fixed shapes; nothing here needs the device to be waited for."""

    ids: Tensor  # [R, A, W] int64: the anchor's token, then mask tokens; all mask tokens where invalid
    positions: Tensor  # [R, A, W] int64, local to the document
    labels: Tensor  # [R, A, W] int64, 0 where not supervised
    supervised: Tensor  # [R, A, W] bool; nothing past the document or the row
    anchors: Tensor  # [R, A] int64
    starts: Tensor  # [R, A] int64, first token of the anchor's document: the context is [start, anchor)
    valid: Tensor  # [R, A] bool
    shift: int = 0
    """0: slot k predicts the token in its own place, the anchor's slot none. 1: every slot predicts the next token."""

    @property
    def size(self) -> int:
        """W."""
        return self.ids.shape[-1]

    @property
    def first(self) -> int:
        """The first slot that predicts something."""
        return 1 - self.shift


def make_blocks(slot: SlotBatch, size: int, mask_token_id: int, shift: int = 0) -> Blocks:
    """Blocks of ``size`` slots behind the slot's anchors. Labels are the row's own ids at anchor + k + ``shift``."""
    anchors, valid = slot.anchors, slot.anchor_valid
    rows, num_anchors = anchors.shape
    seq_len = slot.input_ids.shape[1]
    offsets = torch.arange(size, device=anchors.device)
    index = anchors[..., None] + offsets + shift  # [R, A, W]
    inside = index < seq_len
    flat = index.clamp(max=seq_len - 1).view(rows, -1)
    shape = (rows, num_anchors, size)

    tokens = slot.input_ids.gather(1, flat).view(shape)
    same_document = slot.document_ids.gather(1, flat).view(shape) == slot.document_ids.gather(1, anchors)[..., None]
    supervised = slot.loss_mask.gather(1, flat).view(shape) & inside & same_document & valid[..., None]
    supervised = supervised & (offsets + shift > 0)

    first = slot.position_ids.gather(1, anchors)  # [R, A]
    is_anchor = (offsets == 0) & valid[..., None]
    anchor_ids = slot.input_ids.gather(1, anchors)[..., None]
    return Blocks(
        ids=torch.where(is_anchor, anchor_ids, mask_token_id),
        positions=first[..., None] + offsets,
        labels=torch.where(supervised, tokens, 0),
        supervised=supervised,
        anchors=anchors,
        starts=anchors - first,
        valid=valid,
        shift=shift,
    )


def slot_weights(block_size: int, decay_gamma: float | None, device: torch.device) -> Tensor:
    """Weight of slots 1..B-1: exp(-(k-1)/gamma), or 1 for all when ``decay_gamma`` is None. [B-1] float32."""
    steps = torch.arange(block_size - 1, device=device, dtype=torch.float32)
    return torch.ones_like(steps) if decay_gamma is None else torch.exp(-steps / decay_gamma)
