"""Proof that a target's captured states are what they claim to be, run on the user's real model.

Compares with a plain Hugging Face forward through the library's own attention and ``output_hidden_states``. The
library's last entry is normed, so the last layer is proven by its logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helixctl.data.batch import make_document_batch
from helixctl.models.target import Target


@dataclass(frozen=True)
class CaptureProof:
    """Differences over magnitudes, of the median dimension; 0 is equal.

    Dimension by dimension, because a few of them are thousands of times larger than the others and hide the rest.
    """

    taps: tuple[float, ...]
    """Of every tapped layer's states."""
    neighbours: tuple[float, ...]
    """The same against the layer before: what an off-by-one would look like here."""
    logits: float
    """Of final norm and head applied to the captured last state."""
    embedding: float
    """Of the shared, scaled embedding against the first layer's input."""

    @property
    def holds(self) -> bool:
        """Whether all differences are rounding: SmolLM2 in bfloat16 has 0.03 at most, a neighbouring layer 0.38."""
        taps = all(tap < 0.25 * other for tap, other in zip(self.taps, self.neighbours, strict=True))
        return taps and self.logits < 0.1 and self.embedding < 0.01


@torch.no_grad()
def prove_capture(target: Target, input_ids: Tensor) -> CaptureProof:
    """Run one document of token ids [S] (CPU, int64) both ways. Not while other threads use the target."""
    *states, last = target.features(make_document_batch(input_ids), last_hidden=True)
    config = target.model.config.get_text_config()
    implementation = config._attn_implementation
    target.model.set_attn_implementation(_plain_attention(target, config))
    try:
        plain = target.model(input_ids[None].to(target.device), output_hidden_states=True, use_cache=False)
    finally:
        target.model.set_attn_implementation(implementation)
    hidden: tuple[Tensor, ...] = plain.hidden_states  # entry k is the input of layer k
    final = target.facts.num_layers - 1
    # The library norms its last entry: a tap on the last layer is compared in that form.
    shown = [
        target.shared.final_norm(state) if tap == final else state
        for tap, state in zip(target.taps, states, strict=True)
    ]
    return CaptureProof(
        taps=tuple(_error(state, hidden[tap + 1]) for tap, state in zip(target.taps, shown, strict=True)),
        neighbours=tuple(_error(state, hidden[tap]) for tap, state in zip(target.taps, shown, strict=True)),
        logits=_error(target.shared.logits(target.shared.final_norm(last)), plain.logits),
        embedding=_error(target.shared.embed(input_ids[None].to(target.device)), hidden[0]),
    )


def _plain_attention(target: Target, config: Any) -> str:
    """The library's own, in full precision.

    Its eager attention has a softmax in float32, and the bit that this costs grows to a percent where products are
    float8. Its other one leaves caps on scores out.
    """
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if target.float8 and target.model._supports_sdpa and not capped else "eager"


def _error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.float().flatten(0, -2), wanted.float().flatten(0, -2)  # [tokens, H or V]
    size = wanted.square().mean(0).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return float(((found - wanted).square().mean(0).sqrt() / size).median())
