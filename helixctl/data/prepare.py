"""`prepare`: sources in, a store out; every document that was read is kept or dropped for a named reason.

Held-out sources come first, then the training sources in the recipe's order; documents keep the order of their files,
whatever the number of worker processes. Memory does not grow with the sources, but for 8 bytes per document that find
duplicates and 32 per document of the held-out sources that keep these out of training.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from helixctl.data.documents import Document, DocumentOptions, number_of_copies
from helixctl.data.files import SourceReader
from helixctl.data.fingerprint import check_tokenizer, describe_tokenizer, load_fast_tokenizer
from helixctl.data.records import Bad, Piece
from helixctl.data.store import Manifest, SourceCounts, Split, SplitName, Store
from helixctl.data.store_writer import StoreWriter
from helixctl.data.workers import Chunk, ChunkResult, open_workers
from helixctl.errors import DataError
from helixctl.plugins import FORMATS, load_plugin
from helixctl.recipe.load import AnyRecipe
from helixctl.recipe.schema import DataOptions, SourceOptions, StoreOptions

Progress = Callable[[int, int, int], None]
"""Called with bytes read, bytes in all, documents kept."""

_CHUNK_BYTES = 1 << 18
_CHUNK_PIECES = 256
_NUM_EXAMPLES = 5
_CHOSEN_REASONS = ("sampled_out", "held_out")
_TOO_MUCH_SUPERVISED = 0.999


@dataclass(frozen=True)
class PrepareResult:
    """What `prepare` did; ``read == kept + sum(dropped.values())``."""

    store: Store
    read: int
    kept: int
    dropped: dict[str, int]
    """Documents by reason."""
    examples: dict[str, tuple[str, ...]]
    """A few different cases of every reason, with their places."""
    duplicates: int
    """Kept documents whose content had been seen before; they stay, in the same split as the first."""
    tokens: int
    """Training and validation, repeats included."""
    supervised_share: float
    num_truncated: int
    """Training documents that rows of data.seq_len cut."""
    num_left_out: int
    """Training documents whose supervised tokens all lie behind data.seq_len; the loader leaves them out."""
    elapsed_s: float

    @property
    def manifest(self) -> Manifest:
        """Counts by source and split, fingerprints."""
        return self.store.manifest


@dataclass(frozen=True)
class Sample:
    """One document for people's eyes."""

    tokens: list[str]
    """Text of every token."""
    supervised: list[bool]


def prepare(recipe: AnyRecipe, *, on_progress: Progress | None = None) -> PrepareResult:
    """Read the sources of `recipe.data` and write its store; an old store is replaced when the new one is complete.

    Raises:
        DataError: a source cannot be read, nothing is left to train on, more is dropped than data.max_dropped allows,
            or the mask makes no sense; the old store stays as it was.
        ModelError: there is no usable tokenizer.
    """
    started_at = time.monotonic()
    data = recipe.data
    tokenizer = load_fast_tokenizer(recipe.text_model)
    sources = [_Source(options, "validation") for options in data.validation.sources]
    sources += [_Source(options, "train") for options in data.train]
    total_bytes = sum(source.reader.total_bytes for source in sources)
    options = DocumentOptions(data.mask_policy, data.validation.fraction)
    with (
        StoreWriter(data.store, describe_tokenizer(tokenizer)) as writer,
        open_workers(data.workers, recipe.text_model, options) as process,
    ):
        tally = _Tally(writer, sources, lambda document: _show(document, tokenizer))
        for result in process(_chunks(sources)):
            tally.add(result)
            if on_progress is not None:
                on_progress(result.num_bytes, total_bytes, tally.kept)
        tally.check(data)
        counts = [source.counts() for source in sources]
        writer.finish(counts, mask_policy=data.mask_policy, validation_fraction=data.validation.fraction)
    return _result(data, tally, time.monotonic() - started_at)


def samples(recipe: AnyRecipe, num_samples: int) -> list[Sample]:
    """The first training documents of the recipe's store, token by token.

    Raises:
        DataError: no store, or one made with another tokenizer.
    """
    store = Store.open(recipe.data.store)
    tokenizer = load_fast_tokenizer(recipe.text_model)
    check_tokenizer(store, tokenizer)
    train = store.split("train")
    return [
        Sample(
            [str(tokenizer.decode([token])) for token in train.tokens(i).tolist()],
            [bool(flag) for flag in train.loss_mask(i)],
        )
        for i in range(min(num_samples, train.num_documents))
    ]


@dataclass
class _Source:
    """A source and what became of its documents so far."""

    options: SourceOptions
    role: SplitName
    reader: SourceReader = field(init=False)
    read: int = 0
    kept: int = 0
    repeats: int = 0
    tokens: int = 0
    """Of documents whose mask comes from the chat template."""
    supervised: int = 0
    """Of ``tokens``."""
    dropped: Counter[str] = field(default_factory=Counter)
    first: Document | None = None
    """The first such document."""

    def __post_init__(self) -> None:
        plugin = load_plugin(FORMATS, self.options.format)
        self.reader = SourceReader(self.options.path, whole_files=plugin.WHOLE_FILES)

    def counts(self) -> SourceCounts:
        """For the manifest; the reader has come to its end."""
        assert self.read == self.kept + self.dropped.total(), "every document is kept or dropped"
        return SourceCounts(
            path=str(self.options.path),
            format=self.options.format,
            weight=self.options.weight,
            role=self.role,
            sha256=self.reader.sha256,
            num_bytes=self.reader.num_bytes,
            read=self.read,
            kept=self.kept,
            repeats=self.repeats,
            dropped=dict(self.dropped),
        )


class _Tally:
    """Puts documents into the store and counts."""

    def __init__(self, writer: StoreWriter, sources: Sequence[_Source], show: Callable[[Document | None], str]) -> None:
        self._writer = writer
        self._show = show
        self._sources = sources
        self._held_out: set[bytes] = set()
        self._hashes = array("Q")
        self._prompts: set[bytes] = set()
        self._examples: dict[str, dict[str, str]] = {}
        """By reason: different details, each with the place where it was met first."""

    @property
    def read(self) -> int:
        return sum(source.read for source in self._sources)

    @property
    def kept(self) -> int:
        return sum(source.kept for source in self._sources)

    @property
    def dropped(self) -> Counter[str]:
        return sum((source.dropped for source in self._sources), Counter())

    @property
    def examples(self) -> dict[str, tuple[str, ...]]:
        return {
            reason: tuple(f"{where}: {detail}" for detail, where in examples.items())
            for reason, examples in self._examples.items()
        }

    @property
    def duplicates(self) -> int:
        hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        return int(hashes.size - np.unique(hashes).size)

    def add(self, result: ChunkResult) -> None:
        """Write the documents of a chunk."""
        source = self._sources[result.source]
        for outcome in result.outcomes:
            source.read += 1
            if isinstance(outcome, Bad):
                self._drop(source, outcome.reason, outcome)
            else:
                self._add_document(source, outcome)

    def _add_document(self, source: _Source, document: Document) -> None:
        if source.role == "validation":
            self._held_out.add(document.digest)
        elif document.digest in self._held_out:
            return self._drop(source, "held_out")
        copies = number_of_copies(source.options.weight, document.digest) if document.split == "train" else 1
        if copies == 0:
            return self._drop(source, "sampled_out")
        index = self._writer.add(document.split, document.input_ids, document.loss_mask, copies=copies)
        if document.prompt is not None:
            self._add_prompt(index, document.prompt)
        self._hashes.append(int.from_bytes(document.digest[:8], "big"))
        source.kept += 1
        source.repeats += copies - 1
        if document.templated:
            source.tokens += document.input_ids.size
            source.supervised += int(document.loss_mask.sum())
            source.first = source.first or document
        return None

    def _add_prompt(self, index: int, prompt: dict[str, Any]) -> None:
        """Several answers to one held-out prompt make one prompt of live decoding."""
        digest = hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()
        if digest not in self._prompts:
            self._prompts.add(digest)
            self._writer.add_prompt({"index": index, **prompt})

    def _drop(self, source: _Source, reason: str, example: Bad | None = None) -> None:
        source.dropped[reason] += 1
        examples = self._examples.setdefault(reason, {})
        if example is not None and len(examples) < _NUM_EXAMPLES:
            examples.setdefault(example.detail, example.where)

    def check(self, data: StoreOptions) -> None:
        """Raise a DataError when the sums or shares say that something is wrong."""
        splits = [self._writer.split_counts("train"), self._writer.split_counts("validation")]
        written = sum(split.documents for split in splits)
        assert written == self.kept + sum(s.repeats for s in self._sources), "every source is in the store as counted"
        dropped = self.dropped
        failed = dropped.total() - sum(dropped[reason] for reason in _CHOSEN_REASONS)
        if splits[0].documents == 0:
            raise DataError(f"of {self.read} documents none is left to train on{self._reasons()}", fix=_DROP_FIX)
        if failed > data.max_dropped * self.read:
            text = f"{failed} of {self.read} documents were dropped, data.max_dropped allows {data.max_dropped:.0%}"
            raise DataError(text + self._reasons(), fix=_DROP_FIX)
        for source in self._sources:
            if source.supervised > _TOO_MUCH_SUPERVISED * max(source.tokens, 1):
                share, shown = source.supervised / source.tokens, self._show(source.first)
                text = f"{source.options.path}: {share:.1%} of the tokens are supervised, questions too: {shown}"
                raise DataError(text, fix="correct the {% generation %} tags of the chat template")

    def _reasons(self) -> str:
        lines: list[str] = []
        examples = self.examples
        for reason, count in self.dropped.most_common():
            lines.append(f"\n  {reason}: {count}")
            lines += [f"\n    {example}" for example in examples[reason]]
        return "".join(lines)


_DROP_FIX = "correct the sources or the chat template; data.max_dropped sets how much may be dropped"


def _chunks(sources: Sequence[_Source]) -> Iterator[Chunk]:
    done_bytes = 0
    for place, source in enumerate(sources):
        for pieces in _batches(source.reader.pieces()):
            num_bytes = done_bytes + source.reader.num_bytes
            yield Chunk(place, source.options, source.role == "validation", pieces, num_bytes)
        done_bytes += source.reader.num_bytes


def _batches(pieces: Iterator[Piece]) -> Iterator[tuple[Piece, ...]]:
    batch: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += len(piece.raw)
        if num_bytes >= _CHUNK_BYTES or len(batch) >= _CHUNK_PIECES:
            yield tuple(batch)
            batch, num_bytes = [], 0
    if batch:
        yield tuple(batch)


def _show(document: Document | None, tokenizer: PreTrainedTokenizerBase) -> str:
    return repr(str(tokenizer.decode(document.input_ids[:100].tolist()))) if document else ""


def _result(data: StoreOptions, tally: _Tally, elapsed_s: float) -> PrepareResult:
    store = Store.open(data.store)
    train: Split = store.split("train")
    splits = store.manifest.splits.values()
    tokens = sum(split.tokens for split in splits)
    cuts = isinstance(data, DataOptions)  # a causal LM goes on with the next window
    return PrepareResult(
        store=store,
        read=tally.read,
        kept=tally.kept,
        dropped=dict(tally.dropped),
        examples=tally.examples,
        duplicates=tally.duplicates,
        tokens=tokens,
        supervised_share=sum(split.supervised for split in splits) / tokens,
        num_truncated=train.num_truncated(data.seq_len) if cuts else 0,
        num_left_out=train.num_documents - int(train.trainable(data.seq_len).size) if cuts else 0,
        elapsed_s=elapsed_s,
    )
