"""Features of documents that a target has seen before, kept in memory: a small set needs one target pass in all.

Documents do not see each other, so their features do not depend on the row they are packed into, but for rounding. What
is cached is therefore always computed in the same company, and the same bits whenever it is computed: a resumed run,
whose cache is empty, trains as the uninterrupted one did. ``CachedFeatures`` takes documents one at a time, as
``prepare --features`` does; ``CachedRows`` takes the micro-batches of the first epoch, for a target that was compiled
for their shape.

Legend: R rows, S tokens per row, K taps, H target width, T tokens that the cache holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helixctl.data.batch import MicroBatch, make_document_batch
from helixctl.models.target import Target

_log = logging.getLogger(__name__)


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
        for document, row, start, end in _spans(batch):
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


@dataclass(frozen=True)
class Layout:
    """Where the cache keeps documents, and the micro-batch of the first epoch that each is computed in."""

    batches: dict[int, int] = field(default_factory=dict)
    """By document; none for those that the cache has no room for."""
    starts: dict[int, int] = field(default_factory=dict)
    """First token in the cache, by document."""
    num_tokens: int = 0
    """T."""


def make_layout(documents: Iterable[tuple[int, int, int]], max_tokens: int) -> Layout:
    """Room for the first epoch's documents, from the first on until ``max_tokens`` would be exceeded.

    Args:
        documents: micro-batch, document and tokens of each, in the order of the epoch (``BatchLoader.first_epoch``).
        max_tokens: Most tokens in the cache.
    """
    batches: dict[int, int] = {}
    starts: dict[int, int] = {}
    end = num_left_out = 0
    for batch, document, num_tokens in documents:
        if num_left_out or end + num_tokens > max_tokens:
            num_left_out += 1
            continue
        batches[document], starts[document] = batch, end
        end += num_tokens
    if num_left_out:
        _log.warning(
            "target.feature_cache_mib has no room for %d of %d documents; a micro-batch with one of them costs a "
            "target pass in every epoch",
            num_left_out,
            num_left_out + len(batches),
        )
    return Layout(batches, starts, end)


class CachedRows:
    """A feature source in front of one that wants whole micro-batches; on its device, used by one thread.

    A document's features are those that its micro-batch of the first epoch gives. In that epoch nothing is computed
    twice; a run that begins later, or beside other target loops, computes the micro-batches that it lacks. Serving
    queues one copy per tap and waits for nothing.
    """

    lends = False

    def __init__(
        self, source: FeatureSource, batch_at: Callable[[int], MicroBatch], layout: Layout, kept: Sequence[Tensor]
    ) -> None:
        """Empty.

        Args:
            source: Computes features; those that it lends are copied before its next call.
            batch_at: Training micro-batch of the run by its ``index``.
            layout: Which documents are kept, and where.
            kept: K tensors [T, H] on the source's device, to keep them in.
        """
        self.device = source.device
        self.num_computed = 0
        """Micro-batches that the source has computed."""
        self._source = source
        self._batch_at = batch_at
        self._layout = layout
        self._kept = kept
        self._known: set[int] = set()  # micro-batches of the first epoch

    def features(self, batch: MicroBatch) -> list[Tensor]:
        """K tensors [R, S, H], queued on the current stream."""
        documents = [document for row in batch.documents for document in row]
        if batch.role != "train" or not all(document in self._layout.batches for document in documents):
            return [feature.clone() for feature in self._compute(batch)]
        for number in sorted({self._layout.batches[document] for document in documents} - self._known):
            self._keep(number, batch if batch.index == number else self._batch_at(number))
        shape = batch.input_ids.shape
        index = np.zeros(shape, np.int64)  # [R, S]; padding gets what is there
        for document, row, start, end in _spans(batch):
            first = self._layout.starts[document]
            index[row, start:end] = np.arange(first, first + end - start)
        places = self._send(index.reshape(-1))
        return [kept.index_select(0, places).view(*shape, -1) for kept in self._kept]

    def _keep(self, number: int, batch: MicroBatch) -> None:
        """Compute micro-batch ``number`` and keep what belongs to it, which stands together in the cache."""
        first: int | None = None
        tokens: list[NDArray[np.int64]] = []
        seen: set[int] = set()
        for document, row, start, end in _spans(batch):
            # The epoch's last micro-batch goes on with the next epoch, whose documents are kept elsewhere.
            if self._layout.batches.get(document) != number or document in seen:
                continue
            seen.add(document)
            first = self._layout.starts[document] if first is None else first
            begin = row * batch.input_ids.shape[1]
            tokens.append(np.arange(begin + start, begin + end))
        assert first is not None, f"a document of micro-batch {number} was asked for"
        wanted = self._send(np.concatenate(tokens))
        for kept, feature in zip(self._kept, self._compute(batch), strict=True):
            kept[first : first + len(wanted)] = feature.flatten(0, 1).index_select(0, wanted)
        self._known.add(number)

    def _compute(self, batch: MicroBatch) -> list[Tensor]:
        self.num_computed += 1
        return self._source.features(batch)

    def _send(self, index: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(index)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _spans(batch: MicroBatch) -> Iterable[tuple[int, int, int, int]]:
    """Document, row, start and end of everything in the micro-batch."""
    for row, (documents, spans) in enumerate(zip(batch.documents, batch.spans, strict=True)):
        for document, (start, end) in zip(documents, spans, strict=True):
            yield document, row, start, end
