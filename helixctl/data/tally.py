"""What became of every document that `prepare` read: kept or dropped for a reason, by source, and how often kept."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helixctl.data.documents import Document
from helixctl.data.mixing import BLOCK_DOCUMENTS, Copier, weight_for
from helixctl.data.records import Bad
from helixctl.data.sources import Reader, open_source
from helixctl.data.store import SourceCounts, SplitName
from helixctl.data.store_writer import StoreWriter
from helixctl.data.workers import ChunkResult
from helixctl.errors import DataError
from helixctl.recipe.schema import SourceOptions, StoreOptions

_NUM_EXAMPLES = 5
_CHOSEN_REASONS = ("sampled_out", "held_out")
_TOO_MUCH_SUPERVISED = 0.999
_MOST_MASK_TOKENS = 0.01
_SHARE_TOLERANCE = 0.01


@dataclass
class Source:
    """A source and what became of its documents so far."""

    options: SourceOptions
    role: SplitName
    reader: Reader = field(init=False)
    copier: Copier = field(init=False)
    read: int = 0
    kept: int = 0
    held_out: int = 0
    entries: int = 0
    """In the training split: one for every copy."""
    entry_tokens: int = 0
    entry_supervised: int = 0
    tokens: int = 0
    """Of documents whose mask comes from the chat template."""
    supervised: int = 0
    """Of ``tokens``."""
    dropped: Counter[str] = field(default_factory=Counter)
    first: Document | None = None
    """The first such document."""
    waiting: list[Document] = field(default_factory=list)
    """Training documents until their block is full."""

    def __post_init__(self) -> None:
        self.reader = open_source(self.options)
        self.copier = Copier(self.options.weight)

    def counts(self) -> SourceCounts:
        """For the manifest; the reader has come to its end."""
        assert self.read == self.kept + self.dropped.total(), "every document is kept or dropped"
        return SourceCounts(
            path=self.options.place,
            format=self.options.format,
            weight=self.options.weight,
            role=self.role,
            sha256=self.reader.sha256,
            num_bytes=self.reader.num_bytes,
            read=self.read,
            kept=self.kept,
            repeats=self.entries - (self.kept - self.held_out),
            dropped=dict(self.dropped),
            name=self.options.label,
            held_out=self.held_out,
            documents=self.entries,
            tokens=self.entry_tokens,
            supervised=self.entry_supervised,
        )


class Tally:
    """Puts documents into the store and counts."""

    def __init__(self, writer: StoreWriter, sources: Sequence[Source], show: Callable[[Document | None], str]) -> None:
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
        """Documents read from all sources."""
        return sum(source.read for source in self._sources)

    @property
    def kept(self) -> int:
        """Documents kept, repeats not counted."""
        return sum(source.kept for source in self._sources)

    @property
    def dropped(self) -> Counter[str]:
        """Documents dropped, by reason."""
        return sum((source.dropped for source in self._sources), Counter())

    @property
    def examples(self) -> dict[str, tuple[str, ...]]:
        """A few different cases of every reason, with their places."""
        return {
            reason: tuple(f"{where}: {detail}" for detail, where in examples.items())
            for reason, examples in self._examples.items()
        }

    @property
    def duplicates(self) -> int:
        """Kept documents whose content had been seen before."""
        hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        return int(hashes.size - np.unique(hashes).size)

    def add(self, result: ChunkResult) -> None:
        """Write the documents of a chunk."""
        source = self._sources[result.source]
        for earlier in self._sources[: result.source]:
            self._write_waiting(earlier)
        for outcome in result.outcomes:
            source.read += 1
            if isinstance(outcome, Bad):
                self._drop(source, outcome.reason, outcome)
            else:
                self._add_document(source, outcome)

    def finish(self) -> None:
        """Write what waits for its block; all chunks have been added."""
        for source in self._sources:
            self._write_waiting(source)

    def _add_document(self, source: Source, document: Document) -> None:
        if source.role == "validation":
            self._held_out.add(document.digest)
        elif document.digest in self._held_out:
            return self._drop(source, "held_out")
        if document.split == "validation":
            return self._write(source, document, 1)
        source.waiting.append(document)
        if source.copier.is_even or len(source.waiting) == BLOCK_DOCUMENTS:
            self._write_waiting(source)
        return None

    def _write_waiting(self, source: Source) -> None:
        copies = source.copier.copies([document.digest for document in source.waiting])
        for document, number in zip(source.waiting, copies, strict=True):
            if number:
                self._write(source, document, number)
            else:
                self._drop(source, "sampled_out")
        source.waiting.clear()

    def _write(self, source: Source, document: Document, copies: int) -> None:
        index = self._writer.add(document.split, document.input_ids, document.loss_mask, copies=copies)
        if document.prompt is not None:
            self._add_prompt(index, {**document.prompt, "source": source.options.label})
        self._hashes.append(int.from_bytes(document.digest[:8], "big"))
        source.kept += 1
        tokens, supervised = document.input_ids.size, int(document.loss_mask.sum())
        if document.split == "train":
            source.entries += copies
            source.entry_tokens += copies * tokens
            source.entry_supervised += copies * supervised
        else:
            source.held_out += 1
        if document.templated:
            source.tokens += tokens
            source.supervised += supervised
            source.first = source.first or document

    def _add_prompt(self, index: int, prompt: dict[str, Any]) -> None:
        """Several answers to one held-out prompt make one prompt of live decoding."""
        digest = hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()
        if digest not in self._prompts:
            self._prompts.add(digest)
            self._writer.add_prompt({"index": index, **prompt})

    def _drop(self, source: Source, reason: str, example: Bad | None = None) -> None:
        source.dropped[reason] += 1
        examples = self._examples.setdefault(reason, {})
        if example is not None and len(examples) < _NUM_EXAMPLES:
            examples.setdefault(example.detail, example.where)

    def check(self, data: StoreOptions) -> None:
        """Raise a DataError when the sums or shares say that something is wrong."""
        self._check_sums()
        self._check_mask_token()
        dropped = self.dropped
        failed = dropped.total() - sum(dropped[reason] for reason in _CHOSEN_REASONS)
        if self._writer.split_counts("train").documents == 0:
            raise DataError(f"of {self.read} documents none is left to train on{self._reasons()}", fix=_DROP_FIX)
        if failed > data.max_dropped * self.read:
            text = f"{failed} of {self.read} documents were dropped, data.max_dropped allows {data.max_dropped:.0%}"
            raise DataError(text + self._reasons(), fix=_DROP_FIX)
        for source in self._sources:
            if source.supervised > _TOO_MUCH_SUPERVISED * max(source.tokens, 1):
                share, shown = source.supervised / source.tokens, self._show(source.first)
                text = f"{source.options.place}: {share:.1%} of the tokens are supervised, questions too: {shown}"
                raise DataError(text, fix="correct the {% generation %} tags of the chat template")
        self._check_shares()

    def _check_sums(self) -> None:
        """The composition is what the weights say, exactly, and all of it is in the store."""
        train, validation = self._writer.split_counts("train"), self._writer.split_counts("validation")
        for source in self._sources:
            assert source.entries == source.copier.num_entries, f"{source.options.place}: entries do not fit the weight"
        assert train.documents == sum(source.entries for source in self._sources)
        assert train.tokens == sum(source.entry_tokens for source in self._sources)
        assert train.supervised == sum(source.entry_supervised for source in self._sources)
        assert validation.documents == sum(source.held_out for source in self._sources)

    def _check_mask_token(self) -> None:
        for source in self._sources:
            marked = source.dropped["mask_token"]
            if marked > max(1, _MOST_MASK_TOKENS * source.read):
                text = f"{source.options.label}: drafter.mask_token_id occurs in {marked} of {source.read} documents"
                raise DataError(text + self._reasons(), fix="choose an id that never does; `helixctl init` finds one")

    def _check_shares(self) -> None:
        """What the recipe wants of the composition, in tokens."""
        total = sum(source.entry_tokens for source in self._sources)
        for source in self._sources:
            wanted, own = source.options.share, source.entry_tokens
            if wanted is None or abs(own / total - wanted) <= _SHARE_TOLERANCE:
                continue
            text = f"{source.options.label} makes up {own / total:.1%} of the training tokens, not {wanted:.1%}"
            fix = "change weights, or share"
            if own and 0 < wanted < 1 and own < total:
                weight = source.options.weight * weight_for(wanted, own, total - own)
                fix = f"with weight {weight:.4g} it would, if the other weights stay as they are"
            raise DataError(text, fix=fix)

    def _reasons(self) -> str:
        lines: list[str] = []
        examples = self.examples
        for reason, count in self.dropped.most_common():
            lines.append(f"\n  {reason}: {count}")
            lines += [f"\n    {example}" for example in examples[reason]]
        return "".join(lines)


_DROP_FIX = "correct the sources or the chat template; data.max_dropped sets how much may be dropped"
