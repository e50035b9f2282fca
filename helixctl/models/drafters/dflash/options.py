"""Options of DFlash, the sizes they come to for one target, and what those cost. Never imports torch.

Legend: H target width, K taps, L drafter layers, A anchors per row, B block size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from helixctl.errors import ModelError
from helixctl.recipe.schema import DrafterOptions, Section

if TYPE_CHECKING:
    from helixctl.models.facts import TargetFacts

HEAD_CHUNK_ROWS = 4096
"""Slots per chunk of the head on a GPU; a test holds it equal to the head's own number."""


class Loss(Section):
    """What a block is trained on."""

    cross_entropy: PositiveFloat = 1.0
    """Weight of the hard cross-entropy against the row's own tokens."""
    decay_gamma: PositiveFloat | None = 7.0
    """Slot k weighs exp(-(k-1)/gamma); null weighs all slots alike. 7, 5, 4 suit block sizes 16, 10, 8."""
    sampled_classes: PositiveInt | None = None
    """Train the head on the batch's own tokens plus at least this many others, drawn anew every micro-batch, in place
    of the full vocabulary (CPU quick starts; losses are then estimates). Validation always uses the full vocabulary."""


class Options(DrafterOptions):
    """A block-diffusion drafter: non-causal decoder layers over one block, target features as keys and values."""

    algorithm: Literal["dflash"] = "dflash"
    num_heads: PositiveInt | None = None
    """Query heads; null: the target's."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads; null: the target's."""
    head_dim: PositiveInt | None = None
    """Width of a head; null: the target's."""
    intermediate_size: PositiveInt | None = None
    """Width of the MLP; null: the target's."""
    init_layers: tuple[NonNegativeInt, ...] | None = None
    """Target layers, one per drafter layer, whose weights the drafter starts from; null: random weights. Needs the
    target's own head and MLP sizes. Helps most where documents are few."""
    rope_theta: PositiveFloat | None = None
    """Rotary base; null: the target's. Scaling of the target's rotary positions is never inherited."""
    rms_norm_eps: PositiveFloat | None = None
    """Epsilon of every norm; null: the target's."""
    scale_embeddings: bool = True
    """Feed the drafter embeddings scaled as the target scales its own (Gemma, Granite). false: raw ones, which is what
    vLLM, speculators and SpecForge feed it."""
    loss: Loss = Loss()
    """What a block is trained on."""
    attention: Literal["auto", "flex", "groups", "dense"] = "auto"
    """flex: compiled flex_attention; groups: one call per few anchors; dense: one mask (the slow reference).
    auto: flex on a GPU, groups on a CPU."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        if self.init_layers is not None and self.init_from is not None:
            raise ValueError("init_layers and init_from are both given; a drafter starts from one of them")
        if self.init_layers is not None and len(self.init_layers) != self.num_layers:
            raise ValueError(f"init_layers names {len(self.init_layers)} layers, num_layers is {self.num_layers}")
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        return self


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


def make_shape(options: Options, facts: TargetFacts, num_taps: int | None = None) -> Shape:
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


def num_taps_of(options: Options) -> int:
    """How many target layers are tapped."""
    if options.target_layer_ids is not None:
        return len(options.target_layer_ids)
    return options.num_taps or options.num_layers


def parameter_count(options: Options, facts: TargetFacts) -> int:
    """Trained parameters; the embedding and the head are the target's and not among them."""
    s = make_shape(options, facts)
    attention = 2 * s.hidden_size * s.head_dim * (s.num_heads + s.num_kv_heads) + 2 * s.head_dim
    layer = attention + 3 * s.hidden_size * s.intermediate_size + 2 * s.hidden_size
    return s.num_layers * layer + s.num_taps * s.hidden_size**2 + 2 * s.hidden_size


def activation_bytes(options: Options, facts: TargetFacts, rows: int, seq_len: int) -> int:
    """Estimated peak of one micro-batch beside weights, gradients, optimizer state and slots, in bytes.

    Counts what backward keeps of every layer in a 2-byte compute type (float32 inside the norms), the 2-byte copies
    of the weights, and one chunk of logits. Within a few tens of per cent; meant for choosing a batch size.
    """
    s = make_shape(options, facts)
    slots, tokens = rows * options.num_anchors * s.block_size, rows * seq_len
    q_width, kv_width = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    per_slot = 2 * (4 * s.hidden_size + 4 * q_width + 4 * kv_width + 4 * s.intermediate_size)
    per_slot += 4 * (2 * s.hidden_size + q_width + kv_width + s.num_heads)  # norms and log-sum-exps
    per_token = 2 * 4 * kv_width + 4 * kv_width
    layers = s.num_layers * (slots * per_slot + tokens * per_token)
    context = tokens * s.hidden_size * (4 + 4 + 2)
    classes = s.vocab_size
    if options.loss.sampled_classes is not None:
        classes = min(classes, options.loss.sampled_classes + slots)
    head = min(HEAD_CHUNK_ROWS, slots) * classes * (2 + 4 + 2) + slots * s.hidden_size * 6
    return layers + context + head + 2 * parameter_count(options, facts)
