"""`prepare`: sources in, a store out; every document that was read is kept or dropped for a named reason.

Held-out sources come first, then the training sources in the recipe's order; documents keep the order of their files,
whatever the number of worker processes. Memory does not grow with the sources, but for 8 bytes per document that find
duplicates and 32 per document of the held-out sources that keep these out of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from helixctl.data.documents import Document, DocumentOptions
from helixctl.data.fingerprint import check_tokenizer, describe_tokenizer, load_fast_tokenizer
from helixctl.data.records import Piece
from helixctl.data.store import Manifest, Split, Store
from helixctl.data.store_writer import StoreWriter
from helixctl.data.tally import Source, Tally
from helixctl.data.workers import Chunk, open_workers
from helixctl.errors import DataError
from helixctl.recipe.load import AnyRecipe
from helixctl.recipe.schema import DataOptions, Recipe, StoreOptions

Progress = Callable[[int, int, int], None]
"""Called with bytes read, bytes in all, documents kept."""

_CHUNK_BYTES = 1 << 18
_CHUNK_PIECES = 256


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
    sources = [Source(options, "validation") for options in data.validation.sources]
    sources += [Source(options, "train") for options in data.train]
    total_bytes = sum(source.reader.total_bytes for source in sources)
    options = DocumentOptions(data.mask_policy, data.validation.fraction, _mask_token(recipe, tokenizer))
    with (
        StoreWriter(data.store, describe_tokenizer(tokenizer)) as writer,
        open_workers(data.workers, recipe.text_model, options) as process,
    ):
        tally = Tally(writer, sources, lambda document: _show(document, tokenizer))
        for result in process(_chunks(sources)):
            tally.add(result)
            if on_progress is not None:
                on_progress(result.num_bytes, total_bytes, tally.kept)
        tally.finish()
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


def _mask_token(recipe: AnyRecipe, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The drafter's mask token, which stands in no document; None where there is no drafter."""
    if not isinstance(recipe, Recipe) or recipe.drafter is None:
        return None
    token: int = recipe.drafter.mask_token_id
    uses = {"ends answers": tokenizer.eos_token_id, "fills rows": tokenizer.pad_token_id}
    used = [use for use, other in uses.items() if other == token]
    if used:
        text = f"drafter.mask_token_id {token} is {tokenizer.decode([token])!r}, which {' and '.join(used)}"
        raise DataError(text, fix="choose an id that nothing else uses; `helixctl init` finds one")
    return token


def _chunks(sources: Sequence[Source]) -> Iterator[Chunk]:
    done_bytes = 0
    for place, source in enumerate(sources):
        for pieces in _batches(source.reader.pieces()):
            num_bytes = done_bytes + source.reader.done_bytes
            yield Chunk(place, source.options, source.role == "validation", pieces, num_bytes)
        done_bytes += source.reader.total_bytes


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


def _result(data: StoreOptions, tally: Tally, elapsed_s: float) -> PrepareResult:
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
