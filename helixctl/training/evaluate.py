"""Sums of a validation pass into the metrics that people read."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from helixctl.metrics import names

_LARGEST_EXPONENT = 700.0
"""exp of more is no float."""


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


def lm_validation_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Means over all tokens of a pass, however they were batched; nothing where no token was held out.

    ``sums`` holds loss_num, loss_den, correct, count (scalars).
    """
    if not float(sums["loss_den"]):
        return {}
    loss = _ratio(sums["loss_num"], sums["loss_den"])
    return {
        names.VAL_LOSS: loss,
        names.VAL_PERPLEXITY: math.exp(min(loss, _LARGEST_EXPONENT)),
        names.VAL_ACCURACY: _ratio(sums["correct"], sums["count"]),
    }


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    total = float(denominator)
    return float(numerator) / total if total else 0.0
