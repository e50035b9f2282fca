"""What the training loop trains, seen from the loop: a drafter or a causal LM on one device, for one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from helixctl.data.batch import SlotBatch
from helixctl.models.drafters._terms import LossTerms
from helixctl.models.shared import SharedWeights
from helixctl.plan import Plan
from helixctl.training.warmup import captures, warm_up_drafter


class Learner(Protocol):
    """A module, and what one slot adds to its loss and its metrics."""

    @property
    def module(self) -> nn.Module:
        """Float32 masters on the loop's device; what checkpoints hold."""

    @property
    def capturable(self) -> bool:
        """Whether ``loss`` queues the same work for every micro-batch, and so little that a CUDA graph is worth it."""

    def loss(self, slot: SlotBatch) -> LossTerms:
        """Additive loss terms of one micro-batch; the numerator carries the gradient."""

    def evaluate(self, slot: SlotBatch) -> dict[str, Tensor]:
        """Additive metric sums of one micro-batch, full vocabulary, no gradient."""

    def warm_up(self, slot: SlotBatch, passes: Callable[[], None]) -> None:
        """Compile: run ``passes``, a training and a validation pass, on the fullest slot there can be; empties it."""


class DrafterLearner:
    """A drafter of any algorithm with what it borrows from its target."""

    def __init__(self, plan: Plan, module: nn.Module, shared: SharedWeights) -> None:
        self._plan = plan
        self._drafter: Any = module  # see Drafter in loop.py
        self._shared = shared

    @property
    def module(self) -> nn.Module:
        """See ``Learner``."""
        module: nn.Module = self._drafter
        return module

    @property
    def capturable(self) -> bool:
        """See ``Learner``."""
        return captures(self._plan) and bool(self._drafter.capturable)

    def loss(self, slot: SlotBatch) -> LossTerms:
        """See ``Learner``."""
        terms: LossTerms = self._drafter.loss(slot, self._shared)
        return terms

    def evaluate(self, slot: SlotBatch) -> dict[str, Tensor]:
        """See ``Learner``."""
        sums: dict[str, Tensor] = self._drafter.evaluate(slot, self._shared)
        return sums

    def warm_up(self, slot: SlotBatch, passes: Callable[[], None]) -> None:
        """See ``Learner``."""
        self._drafter.compiles = True
        warm_up_drafter(slot, self._plan, passes)
