"""What is wrong with features: documents that are not finite are left out, taps that carry nothing end the run.

Legend: R rows, S tokens per row, A anchors per row, K taps, H target width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helixctl.data.batch import MicroBatch, SlotBatch
from helixctl.errors import ModelError


def leave_out_bad(slot: SlotBatch) -> None:
    """Find documents with a feature that is NaN or infinite, and take them out of loss and context.

    Nothing waits for the device: the documents' features become zeros and their anchors invalid, at fixed shapes, and
    ``slot.bad`` [R, S] says which tokens are theirs. What a target writes at padding means nothing, but products run
    over it too, and 0 x NaN is NaN in their gradients: there it becomes zero.
    """
    if not _features(slot):
        return  # a causal LM has none
    ids = slot.document_ids.clamp_min(0).long()  # [R, S]
    real = slot.document_ids >= 0
    bad = torch.zeros_like(real)
    for feature in _features(slot):
        # A sum is finite where its terms are. float16 could overflow; bfloat16 cannot, and a cast costs a copy.
        wide = torch.float32 if feature.dtype == torch.float16 else None
        bad |= ~feature.sum(-1, dtype=wide).isfinite()
    counts = torch.zeros_like(ids).scatter_add_(1, ids, (bad & real).long())  # bad tokens by document
    slot.bad = (counts.gather(1, ids) > 0) & real
    cleared = slot.bad | bad
    if cleared.is_cpu and not cleared.any():
        return
    for feature in _features(slot):
        feature.masked_fill_(cleared[..., None], 0.0)
    slot.loss_mask &= ~slot.bad
    slot.anchor_valid &= ~slot.bad.gather(1, slot.anchors)


def count_bad(slot: SlotBatch) -> Tensor:
    """Documents of the slot that were left out; a float32 scalar on its device."""
    if slot.bad is None:
        return torch.zeros((), device=slot.input_ids.device)
    return (slot.bad & (slot.position_ids == 0)).sum().float()  # every document begins at position 0


@dataclass(frozen=True)
class LeftOut:
    """What will tell which documents of a micro-batch were left out, once the device is looked at.

    Holds nothing else of the micro-batch: its tokens, pinned where there are GPUs, are free for the next one.
    """

    bad: Tensor
    """[R, S] bool, on the slot's device."""
    documents: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]

    def names(self) -> tuple[int, ...]:
        """Their indices in the store. Waits for the device."""
        bad = self.bad.cpu()
        return tuple(
            document
            for row, (documents, spans) in enumerate(zip(self.documents, self.spans, strict=True))
            for document, (start, _) in zip(documents, spans, strict=True)
            if bad[row, start]
        )


def left_out(slot: SlotBatch) -> list[LeftOut]:
    """One entry for a slot whose features were looked at, none for others."""
    if slot.bad is None or slot.batch is None:
        return []
    return [LeftOut(slot.bad, slot.batch.documents, slot.batch.spans)]


def check_taps(features: Sequence[Tensor], taps: Sequence[int], batch: MicroBatch) -> None:
    """Refuse a target whose taps carry nothing. Waits for the device: for a first micro-batch only.

    Raises:
        ModelError: a tap that is zero everywhere, or two taps that are the same.
    """
    real = (batch.document_ids >= 0).to(features[0].device)
    fix = "choose other drafter.target_layer_ids; if that does not help, report this target"
    own = [feature[real] for feature in features]
    for number, feature in zip(taps, own, strict=True):
        if not feature.any():
            raise ModelError(f"the output of target layer {number} is zero everywhere", fix=fix)
    for i, feature in enumerate(own):
        for j in range(i):
            if torch.equal(own[j], feature):
                raise ModelError(f"target layers {taps[j]} and {taps[i]} have the same output", fix=fix)


def _features(slot: SlotBatch) -> list[Tensor]:
    return slot.features if slot.last_hidden is None else [*slot.features, slot.last_hidden]
