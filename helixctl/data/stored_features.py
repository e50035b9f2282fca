"""Features on disk: what identifies them, which shard holds which document, how many bytes they are.

A folder of features is::

    features.json                 what is stored (fingerprints, taps, width, dtype) and the shards, once all are there
    train-00000.safetensors, ..., validation-00000.safetensors, ...
        layer_<n>                 [T, H]: output of target layer n for the shard's documents, one behind the other
        checksums                 int64 [D]: CRC-32 of each document's features, tap after tap

Every trainable document stands there once, whatever its weight, cut at ``seq_len``, in the order of the store. Which
document is where follows from the store alone. ``training/capture.py`` writes them, ``training/stored.py`` reads them.

Legend: T tokens and D documents of a shard, H target width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helixctl.data.store import SPLITS, Split, SplitName, Store, read_manifest
from helixctl.errors import DataError, Problem
from helixctl.models.facts import DTYPE_BYTES
from helixctl.models.float8_format import Float8

FORMAT_NAME = "helixctl-features"
FORMAT_VERSION = 1
MANIFEST = "features.json"
SHARD_BYTES = 256 << 20
"""Of a shard: what a killed `prepare` loses, at most, per target."""
MAX_SHARDS = 4096
"""Of a large set, whose shards are larger."""
_AGAIN = "run `helixctl prepare RECIPE --features {path}` again"


class FeaturesError(DataError):
    """Stored features are missing, torn, or those of something else."""


@dataclass(frozen=True)
class FeatureKey:
    """What features mean nothing without; all of it known before the target is loaded, but for the weights."""

    data: str
    """Fingerprint of the store."""
    target: str
    """Hash of the target's configuration."""
    taps: tuple[int, ...]
    dtype: str
    width: int
    """H."""
    seq_len: int
    """Longer documents are cut here."""
    weights: str = ""
    """Hash of values drawn from every tensor of the target."""

    @property
    def token_bytes(self) -> int:
        """Of the features of one token."""
        return len(self.taps) * self.width * DTYPE_BYTES[self.dtype]

    @property
    def digest(self) -> str:
        """One hash for all of it, written to every shard."""
        return _digest(asdict(self))


@dataclass(frozen=True)
class FeatureManifest:
    """The content of ``features.json``."""

    key: FeatureKey
    shard_tokens: int
    shards: Mapping[str, int]
    """Bytes of every shard by its file's name; empty until all are there."""

    @property
    def complete(self) -> bool:
        """Whether every shard has been written."""
        return bool(self.shards)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        head = {"format": FORMAT_NAME, "version": FORMAT_VERSION, "complete": self.complete}
        return {**head, "key": asdict(self.key), "shard_tokens": self.shard_tokens, "shards": dict(self.shards)}


@dataclass(frozen=True)
class Shard:
    """Documents of one file: entries [first, end) of its split's layout."""

    name: str
    split: SplitName
    first: int
    end: int
    num_tokens: int


@dataclass(frozen=True)
class SplitLayout:
    """Where the documents of a split are; all arrays [documents], in the order of ``starts``."""

    documents: NDArray[np.int64]
    """Index in the store of the first copy of each document."""
    starts: NDArray[np.int64]
    """Where each begins in the store's tokens: copies of a document share it."""
    lengths: NDArray[np.int64]
    shards: NDArray[np.int64]
    """Number of the shard that holds each."""
    offsets: NDArray[np.int64]
    """First token within the shard."""
    places: NDArray[np.int64]
    """Number of the document within the shard."""

    def find(self, start: int) -> int:
        """The entry of the document that begins at ``start`` of the store's tokens."""
        entry = int(np.searchsorted(self.starts, start))
        assert self.starts[entry] == start, f"no document begins at {start}"
        return entry


def make_layout(split: Split, seq_len: int, shard_tokens: int) -> SplitLayout:
    """Deal the trainable documents of ``split`` to shards of about ``shard_tokens`` tokens."""
    documents = split.trainable(seq_len)
    starts, first = np.unique(split.starts[documents], return_index=True)
    documents = documents[first]
    lengths = np.minimum(split.lengths[documents].astype(np.int64), seq_len)
    before = np.cumsum(lengths) - lengths
    _, first_of, shards = np.unique(before // shard_tokens, return_index=True, return_inverse=True)
    return SplitLayout(
        documents=documents,
        starts=starts,
        lengths=lengths,
        shards=shards.astype(np.int64),
        offsets=before - before[first_of][shards],
        places=np.arange(len(documents)) - first_of[shards],
    )


def make_layouts(store: Store, seq_len: int, shard_tokens: int) -> dict[SplitName, SplitLayout]:
    """The layout of every split."""
    return {name: make_layout(store.split(name), seq_len, shard_tokens) for name in SPLITS}


def list_shards(layouts: Mapping[SplitName, SplitLayout]) -> Iterator[Shard]:
    """Every shard, training first."""
    for split, layout in layouts.items():
        edges = [*np.flatnonzero(layout.places == 0).tolist(), len(layout.starts)]
        for number, (first, end) in enumerate(pairwise(edges)):
            yield Shard(shard_name(split, number), split, first, end, int(layout.lengths[first:end].sum()))


def shard_name(split: SplitName, number: int) -> str:
    """The file of a shard."""
    return f"{split}-{number:05d}.safetensors"


def choose_shard_tokens(store: Store, key: FeatureKey, shard_bytes: int = SHARD_BYTES) -> int:
    """Tokens of a shard: those of ``shard_bytes``, or more where there would be too many files."""
    total = sum(store.split(name).num_tokens for name in SPLITS)
    return max(1, shard_bytes // key.token_bytes, -(-total // MAX_SHARDS))


def digest_target(raw: Mapping[str, Any], float8: Float8 | None) -> str:
    """Hash of a target's configuration, and of how its products are done."""
    return _digest(raw if float8 is None else [raw, asdict(float8)])


def read_features(path: Path) -> FeatureManifest:
    """Read ``features.json`` of the folder ``path``; opens no shard.

    Raises:
        FeaturesError: no features there, another format version, or an unreadable manifest.
    """
    file, again = path / MANIFEST, _AGAIN.format(path=path)
    if not path.exists():
        raise FeaturesError(f"there are no features at {path}", fix=again.removesuffix(" again"))
    if not file.is_file():
        raise FeaturesError(f"{path} is not a folder of features", fix="name another folder")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if (content["format"], content["version"]) != (FORMAT_NAME, FORMAT_VERSION):
            found = f"{content['format']} {content['version']}"
            raise FeaturesError(f"{path} holds {found}, this helixctl reads {FORMAT_NAME} {FORMAT_VERSION}", fix=again)
        key = FeatureKey(**{**content["key"], "taps": tuple(content["key"]["taps"])})
        shards = {str(name): int(size) for name, size in content["shards"].items()}
        return FeatureManifest(key, int(content["shard_tokens"]), shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FeaturesError(f"{file} cannot be read: {type(error).__name__}: {error}", fix=again) from error


def find_features(path: Path) -> FeatureManifest | None:
    """What an earlier `prepare` began in the folder ``path``; None where it is absent or empty.

    Raises:
        FeaturesError: it is a file, or a folder of other things.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    return read_features(path)


def open_features(path: Path, wanted: FeatureKey) -> FeatureManifest:
    """The manifest in ``path``, once its shards are all there and are those that ``wanted`` describes.

    Raises:
        FeaturesError: names everything that differs, or the shard that is missing or torn.
    """
    manifest, again = read_features(path), _AGAIN.format(path=path)
    if not manifest.complete:
        raise FeaturesError(f"the features in {path} are not complete: their `prepare` was stopped", fix=again)
    differing = differences(manifest.key, wanted)
    if differing:
        text = f"the features in {path} do not fit this recipe: {'; '.join(differing)}"
        raise FeaturesError(text, fix=f"restore what changed, or {_AGAIN.format(path='ANOTHER_FOLDER')}")
    for name, expected in manifest.shards.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != expected:
            found = "is missing" if actual is None else f"has {actual} bytes instead of {expected}"
            raise FeaturesError(f"the features in {path} are torn: {name} {found}", fix=again)
    return manifest


def differences(stored: FeatureKey, wanted: FeatureKey) -> list[str]:
    """What of ``stored`` does not serve who wants ``wanted``; weights count where both are known.

    More taps than wanted serve as well: a recipe that needs the last hidden state stores for one that does not.
    """
    found = [
        f"{name} {getattr(stored, field)} instead of {getattr(wanted, field)}"
        for name, field in (("dtype", "dtype"), ("target width", "width"))
        if getattr(stored, field) != getattr(wanted, field)
    ]
    if not {*wanted.taps} <= {*stored.taps}:
        found.insert(0, f"taps {stored.taps} instead of {wanted.taps}")
    others = {"data": "another data", "target": "another target, or another target.quantization"}
    found += [told for name, told in others.items() if getattr(stored, name) != getattr(wanted, name)]
    if stored.weights and wanted.weights and stored.weights != wanted.weights:
        found.append("another target: its weights differ")
    if stored.seq_len < wanted.seq_len:
        found.append(f"documents cut at {stored.seq_len} tokens, data.seq_len is {wanted.seq_len}")
    return found


def check_features(path: Path, wanted: FeatureKey, store: Path) -> Iterator[Problem]:
    """What keeps a recipe with ``target.features: path`` from training; ``wanted.data`` is read from ``store``."""
    try:
        if store.exists():
            open_features(path, replace(wanted, data=read_manifest(store).fingerprint))
    except DataError as error:
        yield Problem("target.features", error.message, fix=error.fix, see="offline-features.md#what-is-refused")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
