"""Options of DSpark, the sizes they come to for one target, and what those cost. Never imports torch.

Legend: H target width, V vocabulary, r rank of the sequential head, N slots of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from helixctl.models.drafters import _memory, _options, _sizes
from helixctl.models.drafters._memory import StepBytes, Work
from helixctl.models.drafters._options import BlockOptions, needs_last_hidden
from helixctl.models.drafters._sizes import make_shape

if TYPE_CHECKING:
    from helixctl.models.facts import TargetFacts

__all__ = ["Loss", "Options", "make_shape", "needs_last_hidden", "parameter_count", "step_bytes"]


class Loss(_options.Loss):
    """What a block is trained on."""

    cross_entropy: NonNegativeFloat = 0.1
    """Weight of the hard cross-entropy against the row's own tokens."""
    l1: NonNegativeFloat = 0.9
    """Weight of the distance sum |target - drafter| of the probabilities; a sampled draft is accepted with probability
    1 - distance / 2."""
    confidence: NonNegativeFloat = 1.0
    """Weight of the confidence head's cross-entropy against that probability."""
    decay_gamma: PositiveFloat | None = 4.0
    """The k-th drafted token weighs exp(-(k-1)/gamma); null weighs all alike."""

    @property
    def needs_last_hidden(self) -> bool:
        """Whether a term compares with the target's distribution."""
        return self.kl > 0 or self.l1 > 0 or self.confidence > 0

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.position_weights == "dpace":
            raise ValueError("position_weights: dpace is not available with a sequential head; use decay")
        return self


class Options(BlockOptions):
    """Every slot of a block predicts the next token, biased by the token before it through two factors of low rank."""

    algorithm: Literal["dspark"] = "dspark"
    block_size: Annotated[int, Field(ge=2)] = 8
    """Tokens drafted per block, the anchor included: one more than the block has slots, and than published
    configurations say."""
    markov_rank: PositiveInt = 256
    """Rank of the sequential head."""
    loss: Loss = Loss()
    """What a block is trained on."""

    @property
    def tells_confidence(self) -> bool:
        """By the confidence head: one that is trained, or came with the drafter that this one starts from."""
        return self.loss.confidence > 0 or self.init_from is not None


def parameter_count(options: Options, facts: TargetFacts) -> int:
    """Trained parameters; the embedding and the head are the target's and not among them."""
    confidence = facts.hidden_size + options.markov_rank + 1
    return _sizes.parameter_count(options, facts) + 2 * facts.vocab_size * options.markov_rank + confidence


def step_bytes(options: Options, facts: TargetFacts, work: Work) -> StepBytes:
    """Peak of one training micro-batch with every anchor in use and every token supervised, in bytes."""
    c = work.compute_bytes
    options = options.model_copy(update={"block_size": options.block_size - 1})  # a block has one slot less
    layers = _memory.step_bytes(options, facts, work)
    num_anchors = _memory.with_computed_anchors(options, work).num_anchors
    looked_up = work.rows * num_anchors * options.block_size * options.markov_rank
    table = facts.vocab_size * options.markov_rank
    return StepBytes(
        kept=layers.kept + looked_up * (4 + (c if c < 4 else 0)) + table * 4,
        passing=layers.passing + looked_up * c,
        copies=layers.copies + (table * c if c < 4 else 0),
    )
