"""Sizes that a block drafter comes to for one target. Never imports torch.

Legend: H target width, K taps, L drafter layers, A anchors per row, B slots per block, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from helixctl.errors import ModelError
from helixctl.models.drafters._options import BlockOptions

if TYPE_CHECKING:
    from helixctl.models.facts import TargetFacts


@dataclass(frozen=True)
class Shape:
    """Every size of one drafter, options and target facts put together."""

    hidden_size: int
    num_layers: int
    num_taps: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    block_size: int


def make_shape(options: BlockOptions, facts: TargetFacts, num_taps: int | None = None) -> Shape:
    """Sizes of the drafter for this target; ``num_taps`` None takes it from the options.

    Raises:
        ModelError: heads that do not divide, or an odd head width, or no MLP width, once the target's values are in.
    """
    heads = options.num_heads or facts.num_heads
    kv_heads = options.num_kv_heads or facts.num_kv_heads
    head_dim = options.head_dim or facts.head_dim
    if heads % kv_heads:
        raise ModelError(
            f"the drafter would have {heads} query heads and {kv_heads} key/value heads",
            fix="set drafter.num_heads to a multiple of drafter.num_kv_heads",
        )
    if head_dim % 2:
        raise ModelError(f"the drafter would have an odd head width, {head_dim}", fix="set drafter.head_dim")
    if not (options.intermediate_size or facts.intermediate_size):
        raise ModelError("the target has no single MLP width to take over", fix="set drafter.intermediate_size")
    return Shape(
        hidden_size=facts.hidden_size,
        num_layers=options.num_layers,
        num_taps=num_taps or num_taps_of(options),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=options.intermediate_size or facts.intermediate_size,
        rope_theta=options.rope_theta or facts.rope_theta,
        rms_norm_eps=options.rms_norm_eps or facts.rms_norm_eps,
        vocab_size=facts.vocab_size,
        block_size=options.block_size,
    )


def num_taps_of(options: BlockOptions) -> int:
    """How many target layers are tapped."""
    if options.target_layer_ids is not None:
        return len(options.target_layer_ids)
    return options.num_taps or options.num_layers


def parameter_count(options: BlockOptions, facts: TargetFacts) -> int:
    """Trained parameters; the embedding and the head are the target's and not among them."""
    s = make_shape(options, facts)
    attention = 2 * s.hidden_size * s.head_dim * (s.num_heads + s.num_kv_heads) + 2 * s.head_dim
    layer = attention + 3 * s.hidden_size * s.intermediate_size + 2 * s.hidden_size
    return s.num_layers * layer + s.num_taps * s.hidden_size**2 + 2 * s.hidden_size
