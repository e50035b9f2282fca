"""Features of documents that a target has seen before, kept in memory: a small set needs one target pass in all.

Documents do not see each other, so their features do not depend on the row they are packed into. They are computed one
document at a time, which makes them the same bits whether they come from the cache or not: a resumed run, whose
cache is empty, trains as the uninterrupted one did.

Legend: R rows, S tokens per row, K taps, H target width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from helixctl.data.batch import MicroBatch, make_document_batch
from helixctl.models.target import Target


class FeatureSource(Protocol):
    """Gives the features of a micro-batch: a target, or a cache in front of one."""

    @property
    def device(self) -> torch.device:
        """Where the features are."""

    @property
    def lends(self) -> bool:
        """Whether features are overwritten ``OUTPUT_SETS`` calls later."""

    def features(self, batch: MicroBatch) -> list[Tensor]:
        """K tensors [R, S, H], one more where the last hidden state is wanted; values at padding mean nothing."""


@dataclass(frozen=True)
class WithLastHidden:
    """A target that gives its last hidden state behind the taps."""

    target: Target

    @property
    def lends(self) -> bool:
        """As the target's own."""
        return self.target.lends

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.target.device

    def features(self, batch: MicroBatch) -> list[Tensor]:
        """K + 1 tensors [R, S, H]."""
        return self.target.features(batch, last_hidden=True)


class CachedFeatures:
    """A feature source that remembers documents until ``budget_bytes`` are full; used by one thread."""

    lends = False

    def __init__(self, source: FeatureSource, budget_bytes: int) -> None:
        self.device = source.device
        self.hits = 0
        self.misses = 0
        self._source = source
        self._left_bytes = budget_bytes
        self._known: dict[tuple[str, int, int], list[Tensor]] = {}  # (role, document, length) -> K x [length, H]

    def features(self, batch: MicroBatch) -> list[Tensor]:
        """K tensors [R, S, H] put together from the documents' own."""
        shape = batch.input_ids.shape
        rows: list[Tensor] = []
        for row, (documents, spans) in enumerate(zip(batch.documents, batch.spans, strict=True)):
            for document, (start, end) in zip(documents, spans, strict=True):
                own = self._of_document((batch.role, document, end - start), batch.input_ids[row, start:end])
                if not rows:
                    rows = [feature.new_zeros((*shape, feature.shape[-1])) for feature in own]
                for whole, feature in zip(rows, own, strict=True):
                    whole[row, start:end] = feature
        return rows

    def _of_document(self, key: tuple[str, int, int], input_ids: Tensor) -> list[Tensor]:
        known = self._known.get(key)
        if known is not None:
            self.hits += 1
            return known
        self.misses += 1
        own = [feature[0].clone() for feature in self._source.features(make_document_batch(input_ids))]
        num_bytes = sum(feature.nbytes for feature in own)
        if num_bytes <= self._left_bytes:
            self._left_bytes -= num_bytes
            self._known[key] = own
        return own
