"""The prepared store: tokenised documents on disk, memory-mapped for reading, replaced as a whole.

A store is a folder::

    store.json                     manifest: format, fingerprints, counts, size and sha256 of every other file
    prompts.jsonl                  prompts of validation documents that come from chats or texts
    train/ and validation/
        tokens.bin                 uint16 (vocabulary below 65536) or uint32, all documents one behind the other
        mask.bin                   one byte per token: 1 where the token is supervised
        starts.bin                 int64 per document: where it begins in the two files above
        lengths.bin                int32 per document
        supervised.bin             int32 per document: supervised tokens
        first_anchor.bin           int32 per document: first position that may carry an anchor

Documents may share tokens: a repeated document (source weight above 1) is one more entry in the index.
``StoreWriter`` in ``store_writer.py`` makes stores; nothing else does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from helixctl.errors import DataError

FORMAT_NAME = "helixctl-store"
FORMAT_VERSION = 1
MANIFEST = "store.json"
PROMPTS = "prompts.jsonl"
SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = ("train", "validation")
INDEX_TYPES: Mapping[str, type[np.generic]] = {
    "starts": np.int64,
    "lengths": np.int32,
    "supervised": np.int32,
    "first_anchor": np.int32,
}
_AGAIN = "run `helixctl prepare` again"
_ACCOUNT = ("role", "weight", "read", "kept", "held_out", "dropped", "documents", "tokens", "supervised")


@dataclass(frozen=True)
class TokenizerInfo:
    """What of the tokenizer decides the ids in a store."""

    sha256: str
    """Hash of vocabulary, merges, added tokens and special tokens."""
    template_sha256: str
    """Hash of the chat template; that of the empty text where there is none."""
    vocab_size: int
    """Length of the tokenizer, added tokens included: one more than the largest id it makes."""
    eos_token_id: int | None
    pad_token_id: int | None


@dataclass(frozen=True)
class SourceCounts:
    """Where the documents of one source went: read == kept + sum(dropped)."""

    path: str
    format: str
    weight: float
    role: SplitName
    """``validation`` for a held-out source; a ``train`` source may still give documents to validation."""
    sha256: str
    """Hash of the content of its files, as stored (compressed files: of the compressed bytes)."""
    num_bytes: int
    read: int = 0
    kept: int = 0
    repeats: int = 0
    """Further copies in the training split, because of a weight above 1; not part of ``kept``."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Documents by reason."""
    name: str = ""
    """What tables call it."""
    held_out: int = 0
    """Of ``kept``: in the validation split."""
    documents: int = 0
    """Entries in the training split, repeats included."""
    tokens: int = 0
    """Of those entries."""
    supervised: int = 0
    """Of ``tokens``."""


@dataclass(frozen=True)
class MixLine:
    """What one source gives to an epoch."""

    name: str
    documents: int
    """Entries, repeats included."""
    tokens: int
    share: float
    """Of the tokens of all sources."""


@dataclass(frozen=True)
class SplitCounts:
    """Size of one split, repeats included."""

    documents: int
    tokens: int
    supervised: int
    longest: int
    """Tokens of the longest document."""


@dataclass(frozen=True)
class Manifest:
    """Everything ``store.json`` says."""

    tokenizer: TokenizerInfo
    mask_policy: str
    validation_fraction: float
    sources: tuple[SourceCounts, ...]
    splits: dict[str, SplitCounts]
    files: dict[str, tuple[int, str]]
    """Bytes and sha256 of every file, by its path inside the store."""

    @property
    def read(self) -> int:
        """Documents read from all sources."""
        return sum(source.read for source in self.sources)

    @property
    def kept(self) -> int:
        """Documents kept, repeats not counted."""
        return sum(source.kept for source in self.sources)

    @property
    def dropped(self) -> dict[str, int]:
        """Documents dropped, by reason, over all sources."""
        total: dict[str, int] = {}
        for source in self.sources:
            for reason, count in source.dropped.items():
                total[reason] = total.get(reason, 0) + count
        return total

    @property
    def mix(self) -> tuple[MixLine, ...]:
        """What an epoch is made of: the sources that give training documents, before rows cut any."""
        total = max(1, sum(source.tokens for source in self.sources))
        return tuple(
            MixLine(source.name, source.documents, source.tokens, source.tokens / total)
            for source in self.sources
            if source.documents
        )

    @property
    def by_source(self) -> dict[str, dict[str, Any]]:
        """Plain values by the source's name; a name that comes again gets a number."""
        found: dict[str, dict[str, Any]] = {}
        total = max(1, sum(source.tokens for source in self.sources))
        for number, source in enumerate(self.sources, start=1):
            values = {name: value for name, value in asdict(source).items() if name in _ACCOUNT}
            name = source.name or source.path
            name = f"{name} ({number})" if name in found else name
            found[name] = {**values, "share": source.tokens / total}
        return found

    @property
    def token_bytes(self) -> int:
        """Bytes per stored token id."""
        return 2 if self.tokenizer.vocab_size < 1 << 16 else 4

    @property
    def fingerprint(self) -> str:
        """sha256 over the tokenizer, the mask policy and every stored byte: equal stores train equally."""
        content = {"version": FORMAT_VERSION, "tokenizer": asdict(self.tokenizer), "files": self.files}
        text = json.dumps({**content, "mask_policy": self.mask_policy}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The content of ``store.json``."""
        return {"format": FORMAT_NAME, "version": FORMAT_VERSION, "fingerprint": self.fingerprint, **asdict(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Manifest:
        """The reverse of ``to_json``; KeyError, TypeError or ValueError where the content is not one."""
        return cls(
            tokenizer=TokenizerInfo(**content["tokenizer"]),
            mask_policy=content["mask_policy"],
            validation_fraction=content["validation_fraction"],
            sources=tuple(SourceCounts(**source) for source in content["sources"]),
            splits={name: SplitCounts(**content["splits"][name]) for name in SPLITS},
            files={name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()},
        )


class Split:
    """The documents of one split, memory-mapped read-only; any number of threads may read."""

    def __init__(self, folder: Path, counts: SplitCounts, token_bytes: int) -> None:
        self.folder = folder
        self.num_documents = counts.documents
        self.num_tokens = counts.tokens
        self.num_supervised = counts.supervised
        self.longest = counts.longest
        self._tokens = _map(folder / "tokens.bin", np.uint16 if token_bytes == 2 else np.uint32)
        self._mask = _map(folder / "mask.bin", np.bool_)
        index = {name: _map(folder / f"{name}.bin", dtype) for name, dtype in INDEX_TYPES.items()}
        self.starts: NDArray[np.int64] = index["starts"]
        """Where every document begins in the tokens of the split, int64 [num_documents]; copies share it."""
        self.lengths: NDArray[np.int32] = index["lengths"]
        """Tokens of every document, int32 [num_documents]."""
        self.supervised_counts: NDArray[np.int32] = index["supervised"]
        """Supervised tokens of every document, int32 [num_documents]."""
        self.first_anchors: NDArray[np.int32] = index["first_anchor"]
        """First position of every document that may carry an anchor, int32 [num_documents]."""

    def tokens(self, document: int) -> NDArray[np.uint32]:
        """Ids of one document, uint32 [length]."""
        return self._tokens[self._range(document)].astype(np.uint32, copy=False)

    def loss_mask(self, document: int) -> NDArray[np.bool_]:
        """Supervised tokens of one document, bool [length]."""
        return self._mask[self._range(document)]

    def last_tokens(self) -> NDArray[np.int64]:
        """Last id of every document, int64 [num_documents]; -1 of an empty one."""
        last = np.full(self.num_documents, -1, np.int64)
        full = self.lengths > 0
        last[full] = self._tokens[self.starts[full] + self.lengths[full] - 1]
        return last

    def trainable(self, seq_len: int) -> NDArray[np.int64]:
        """Documents, int64 and ascending, that still have an eligible anchor once they are cut at ``seq_len``."""
        return np.flatnonzero(self.first_anchors + 1 < min(seq_len, np.iinfo(np.int32).max))

    def num_truncated(self, seq_len: int) -> int:
        """Documents longer than ``seq_len``."""
        return int((self.lengths > seq_len).sum())

    def _range(self, document: int) -> slice:
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        start = int(self.starts[document])
        return slice(start, start + int(self.lengths[document]))


class Store:
    """A complete store, opened for reading."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._splits = {name: Split(path / name, manifest.splits[name], manifest.token_bytes) for name in SPLITS}

    @classmethod
    def open(cls, path: Path) -> Store:
        """Open the store in ``path``; checks the manifest and the size of every file, not their content.

        Raises:
            DataError: no store, another format, or a torn one.
        """
        manifest = read_manifest(path)
        _check_files(path, manifest)
        return cls(path, manifest)

    def split(self, name: SplitName) -> Split:
        """The documents of ``train`` or ``validation``."""
        return self._splits[name]

    @property
    def fingerprint(self) -> str:
        """Identity of the data, compared by a resume."""
        return self.manifest.fingerprint

    def prompts(self) -> list[dict[str, Any]]:
        """Prompts of validation documents: {"index", "messages", "tools"?} or {"index", "text"}."""
        with (self.path / PROMPTS).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def verify(self) -> None:
        """Read every byte and compare it with the manifest.

        Raises:
            DataError: a file's content is not what was written.
        """
        for name, (_, expected) in self.manifest.files.items():
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise DataError(f"{self.path / name} is damaged: its content is not what was written", fix=_AGAIN)


def is_store(path: Path) -> bool:
    """True when ``path`` is a folder whose manifest says that helixctl wrote it, whatever its version or state."""
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT_NAME


def read_manifest(path: Path) -> Manifest:
    """Read ``store.json`` of the store in ``path``; opens no other file.

    Raises:
        DataError: no store, another format version, or an unreadable manifest.
    """
    file = path / MANIFEST
    if not path.exists():
        raise DataError(f"there is no store at {path}", fix=_missing_fix(path))
    if not file.exists():
        raise DataError(f"{path} is not a store: it has no {MANIFEST}", fix="give data.store another folder")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT_NAME:
            raise DataError(f"{path} is not a store of helixctl", fix="give data.store another folder")
        if content["version"] != FORMAT_VERSION:
            text = f"{path} has store format {content['version']}, this helixctl reads {FORMAT_VERSION}"
            raise DataError(text, fix=_AGAIN)
        return Manifest.from_json(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} cannot be read: {type(error).__name__}: {error}", fix=_AGAIN) from error


def _check_files(path: Path, manifest: Manifest) -> None:
    for name, (expected, _) in manifest.files.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != expected:
            found = "is missing" if actual is None else f"has {actual} bytes instead of {expected}"
            raise DataError(f"the store {path} is torn: {name} {found}", fix=_AGAIN)


def _missing_fix(path: Path) -> str:
    left_over = old_path(path)
    if is_store(left_over):
        return f"an interrupted prepare left the old one at {left_over}: rename it to {path.name}, or {_AGAIN}"
    return "run `helixctl prepare` first"


def old_path(path: Path) -> Path:
    """Where the store that ``path`` held before stands while it is being replaced."""
    return path.with_name(f".{path.name}.old")


def _map(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)  # the system cannot map an empty file
    return np.memmap(path, dtype=dtype, mode="r")
