"""Sums of a validation pass into the metrics that people read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from helixctl.metrics import names


def validation_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Means over the pass from the additive sums that a drafter's ``evaluate`` returns.

    ``sums`` holds loss_num, loss_den, prefix_sum, num_blocks, maybe ``term_*`` (scalars); correct_k and count_k [B-1].
    """
    values = {
        names.VAL_LOSS: _ratio(sums["loss_num"], sums["loss_den"]),
        names.VAL_ACCEPT_LEN: _ratio(sums["prefix_sum"], sums["num_blocks"]) + 1.0,
    }
    for name in sums:
        if name.startswith(names.TERM):
            values[names.val_term(name.removeprefix(names.TERM))] = _ratio(sums[name], sums["loss_den"])
    correct, count = sums["correct_k"].tolist(), sums["count_k"].tolist()
    for slot, (right, total) in enumerate(zip(correct, count, strict=True), start=1):
        values[names.val_accuracy(slot)] = right / total if total else 0.0
    return values


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    total = float(denominator)
    return float(numerator) / total if total else 0.0
