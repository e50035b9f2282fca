"""Documents of source files as an endless-capable stream of batches, split over ranks and workers.

A *lane* is one worker of one rank. All lanes go through the epoch's files in the same order and take every n-th
document each, so no document is seen twice and one large file is split as well as many small ones; only its own
documents cost a lane more than reading a line. Nothing is read before it is needed, and nothing is written to disk.

Where a lane stands is three numbers (``Place``) and travels with every batch. A stream that begins there reads up to
that document without tokenising, and goes on at its token.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from helixctl.data.chat import MaskPolicy
from helixctl.data.documents import DocumentMaker, DocumentOptions
from helixctl.data.mixing import Copier, blocks
from helixctl.data.records import Bad, Piece
from helixctl.data.sources import open_source, parts
from helixctl.data.token_batch import Place, TokenBatch, make_token_batch
from helixctl.data.windows import ALONE, Numbered, Shard, Window, WindowOptions, pack_stream, with_end
from helixctl.plugins import FORMATS, load_plugin
from helixctl.recipe.schema import SourceOptions

_FILES_KEY = 11
_BUFFER_KEY = 12


@dataclass(frozen=True)
class Stream:
    """What a streaming loader reads."""

    sources: tuple[SourceOptions, ...]
    tokenizer: PreTrainedTokenizerBase
    shuffle: bool = True
    """Files in a new order every epoch, documents within ``buffer_documents``; off for validation."""
    buffer_documents: int = 1024
    """Documents per lane among which the next is drawn; they are raw text, and 1 keeps the order of the file."""
    mask_policy: MaskPolicy = "all_turns"
    """Which assistant turns of conversations are supervised."""
    endless: bool = False
    """Epoch after epoch in one iteration: for several ranks, whose shares need not have equally many batches."""


class _Raw(NamedTuple):
    """A document before parsing."""

    source: SourceOptions
    piece: Piece


class StreamDataset(IterableDataset[TokenBatch]):
    """Yields whole batches. Every ``iter()`` goes through one epoch, the next one each time, also in a worker."""

    worker_modules = ("helixctl.models.tokenizer",)
    """What workers need beside the module of this class; a server imports it once."""

    def __init__(self, stream: Stream, options: WindowOptions, shard: Shard = ALONE) -> None:
        self._stream = stream
        self._options = options
        self._shard = shard
        self._epoch = 0
        self._places: Mapping[int, Place] = {}
        self._first_lane = 0

    def begin(self, epoch: int, places: Mapping[int, Place], first_lane: int) -> None:
        """Where the next ``iter()`` begins.

        Args:
            epoch: its epoch.
            places: lanes of this rank that begin elsewhere than at the epoch's start.
            first_lane: the lane of the first worker; the others follow in turn.
        """
        self._epoch, self._places, self._first_lane = epoch, dict(places), first_lane

    def __iter__(self) -> Iterator[TokenBatch]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        lane = (worker + self._first_lane) % num_workers
        place = self._places.get(lane, Place(self._epoch, 0, 0))
        self.begin(self._epoch + 1, {}, 0)  # for the next iter(), in a worker that lives on
        return self._batches(lane, num_workers, place)

    def _batches(self, lane: int, num_lanes: int, place: Place) -> Iterator[TokenBatch]:
        while True:
            for batch in self._epoch_batches(lane, num_lanes, place):
                yield replace(batch, lane=lane)
            if not self._stream.endless:
                return
            place = Place(place.epoch + 1, 0, 0)

    def _epoch_batches(self, lane: int, num_lanes: int, place: Place) -> Iterator[TokenBatch]:
        documents = self._documents(self._shard.rank * num_lanes + lane, self._shard.world_size * num_lanes, place)
        windows: list[Window] = []
        counts: Counter[str] = Counter()
        for packed in pack_stream(documents, self._options, place.token):
            counts += packed.counts
            windows += [packed.window] if packed.window is not None else []
            if len(windows) == self._options.rows or (packed.window is None and (windows or counts)):
                after = Place(place.epoch, packed.document, packed.token)
                yield replace(make_token_batch(windows, self._options), place=after, counts=dict(counts))
                windows, counts = [], Counter()

    def _documents(self, share: int, num_shares: int, place: Place) -> Iterator[Numbered]:
        """Tokenised documents of one lane, from ``place.document`` on."""
        maker = DocumentMaker(self._stream.tokenizer, DocumentOptions(self._stream.mask_policy, 0.0))
        own = (raw for n, raw in enumerate(self._raw(place.epoch)) if n % num_shares == share)
        for number, raw in enumerate(self._shuffled(own, place.epoch, share)):
            if number < place.document:
                continue
            made = maker.make(load_plugin(FORMATS, raw.source.format).parse(raw.piece, raw.source), held_out=False)
            if isinstance(made, Bad):
                yield Numbered(number, None, made.reason)
            else:
                yield Numbered(number, with_end(made.input_ids, made.loss_mask, self._options.eos_id))

    def _raw(self, epoch: int) -> Iterator[_Raw]:
        """All documents of an epoch, whoever they belong to; a source's weight repeats or thins them out."""
        files = [(place, part) for place, source in enumerate(self._stream.sources) for part in parts(source)]
        order = np.arange(len(files))
        if self._stream.shuffle:
            order = self._rng(_FILES_KEY, epoch).permutation(len(files))
        copiers = [Copier(source.weight) for source in self._stream.sources]
        for i in order:
            place, part = files[i]
            copier, pieces = copiers[place], open_source(part).pieces()
            if copier.is_even:
                yield from (_Raw(part, piece) for piece in pieces for _ in range(int(copier.weight)))
                continue
            for block in blocks(pieces):
                digests = [hashlib.sha256(b"%d:" % epoch + piece.raw).digest() for piece in block]
                for piece, copies in zip(block, copier.copies(digests), strict=True):
                    yield from [_Raw(part, piece)] * copies

    def _shuffled(self, documents: Iterator[_Raw], epoch: int, share: int) -> Iterator[_Raw]:
        size = self._stream.buffer_documents
        if not self._stream.shuffle or size <= 1:
            yield from documents
            return
        rng = self._rng(_BUFFER_KEY, epoch, share)
        buffer: list[_Raw] = []
        for document in documents:
            if len(buffer) < size:
                buffer.append(document)
                continue
            i = int(rng.integers(size))
            yield buffer[i]
            buffer[i] = document
        yield from (buffer[i] for i in rng.permutation(len(buffer)))

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self._options.seed, self._options.stage, *key])
