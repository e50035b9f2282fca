"""Options that all drafters share which predict a block behind an anchor in one forward. Never imports torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from helixctl.recipe.schema import DrafterOptions, Fraction, Section


class Loss(Section):
    """What a block is trained on: a weighted sum of terms, one pass over the head for all of them."""

    cross_entropy: NonNegativeFloat = 1.0
    """Weight of the hard cross-entropy against the row's own tokens."""
    kl: NonNegativeFloat = 0.0
    """Weight of the divergence KL(target || drafter). The target's distribution is recomputed from its last hidden
    state, so the target then runs all of its layers, and a slot holds one tensor more."""
    kl_temperature: PositiveFloat = 1.0
    """Both sides of the divergence are softened by it; the term is scaled by its square."""
    l1: NonNegativeFloat = 0.0
    """Weight of the distance sum |target - drafter| of the probabilities; a sampled draft is accepted with probability
    1 - distance / 2. Needs the last hidden state as well."""
    position_weights: Literal["decay", "dpace"] = "decay"
    """decay: fixed, by `decay_gamma`. dpace: from how sure the drafter is of the slots before and behind (D-PACE)."""
    decay_gamma: PositiveFloat | None = 7.0
    """Slot k weighs exp(-(k-1)/gamma); null weighs all slots alike. 7, 5, 4 suit block sizes 16, 10, 8."""
    dpace_smoothing: Fraction = 0.5
    """D-PACE takes (1 - smoothing) x probability + smoothing for the probability of a label."""
    sampled_classes: PositiveInt | None = None
    """Train the head on the batch's own tokens plus at least this many others, drawn anew every micro-batch, in place
    of the full vocabulary (CPU quick starts; losses are then estimates). Validation always uses the full vocabulary."""

    @property
    def needs_last_hidden(self) -> bool:
        """Whether a term compares with the target's distribution."""
        return self.kl > 0 or self.l1 > 0

    @model_validator(mode="before")
    @classmethod
    def _no_decay_with_dpace(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("position_weights") == "dpace":
            if data.get("decay_gamma") is not None:
                raise ValueError("decay_gamma has no meaning with position_weights: dpace; set decay_gamma: null")
            return {**data, "decay_gamma": None}
        return data

    @model_validator(mode="after")
    def _check_terms(self) -> Self:
        if self.cross_entropy + self.kl + self.l1 == 0:
            raise ValueError("cross_entropy, kl and l1 are all 0; give one of them a weight")
        return self


class FeatureNoise(Section):
    """Noise on the target's features during training, a function of the seed and of the micro-batch's number."""

    kind: Literal["none", "uniform", "gaussian"] = "none"
    """Shape of the distribution."""
    scale: NonNegativeFloat = 0.1
    """Standard deviation, relative to the mean absolute value of the tap at each token."""


class BlockOptions(DrafterOptions):
    """Decoder layers over one block, with target features as further keys and values."""

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
    feature_noise: FeatureNoise = FeatureNoise()
    """Noise on the features; training only."""
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


def needs_last_hidden(options: BlockOptions) -> bool:
    """Whether training needs the target's last hidden state beside the taps."""
    return options.loss.needs_last_hidden
