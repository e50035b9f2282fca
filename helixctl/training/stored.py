"""Features from disk in place of a target: the same source to its stage, fed by what `prepare --features` wrote.

On a CPU documents were captured one at a time, so a run there trains with the same bits as one with
``target.feature_cache_mib``.

Legend: R rows, S tokens per row, T tokens of a shard, K taps, H target width.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from helixctl.data.batch import MicroBatch
from helixctl.data.store import SplitName, Store
from helixctl.data.stored_features import (
    FeatureKey,
    FeaturesError,
    SplitLayout,
    differences,
    digest_target,
    make_layouts,
    open_features,
    read_features,
    shard_name,
)
from helixctl.models.identity import fingerprint_weights
from helixctl.plan import Plan

_OPEN_SHARDS = 64


def feature_key(plan: Plan, store: Store) -> FeatureKey:
    """What features must have been made from to serve this plan; the weights are left open."""
    return FeatureKey(
        data=store.fingerprint,
        target=digest_target(plan.target.raw, plan.float8),
        taps=plan.captured_layers,
        dtype=plan.target_dtype,
        width=plan.target.hidden_size,
        seq_len=plan.recipe.data.seq_len,
    )


def refuse_other_weights(folder: Path, model: nn.Module) -> None:
    """Compare the features in ``folder`` with a loaded target.

    Raises:
        FeaturesError: they were made by a target with other weights.
    """
    key = read_features(folder).key
    found = differences(key, replace(key, weights=fingerprint_weights(model)))
    if found:
        raise FeaturesError(
            f"the features in {folder} do not fit this recipe: {'; '.join(found)}",
            fix="name the target that they were made with, or run `helixctl prepare RECIPE --features ANOTHER_FOLDER`",
        )


class StoredFeatures:
    """A feature source that reads; used by one thread. A document's checksum is compared when it is first read."""

    lends = False

    def __init__(self, folder: Path, wanted: FeatureKey, store: Store, device: torch.device) -> None:
        """Checks the manifest and the size of every shard.

        Raises:
            FeaturesError: features of something else, not complete, or torn.
        """
        self.device = device
        manifest = open_features(folder, wanted)
        self.key = manifest.key
        self._places = [self.key.taps.index(tap) for tap in wanted.taps]
        """Of the wanted taps among those stored."""
        self._folder = folder
        self._store = store
        self._layouts = make_layouts(store, self.key.seq_len, manifest.shard_tokens)
        self._checked = {name: np.zeros(len(own.starts), np.bool_) for name, own in self._layouts.items()}
        self._open: OrderedDict[str, Any] = OrderedDict()

    def features(self, batch: MicroBatch) -> list[Tensor]:
        """K tensors [R, S, H] on ``device``; zeros at padding.

        Raises:
            FeaturesError: a shard cannot be read, or its content is not what was written.
        """
        shape = (*batch.input_ids.shape, self.key.width)
        dtype, pinned = getattr(torch, self.key.dtype), self.device.type == "cuda"
        rows = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in self._places]
        for row, (documents, spans) in enumerate(zip(batch.documents, batch.spans, strict=True)):
            for document, (start, end) in zip(documents, spans, strict=True):
                for whole, own in zip(rows, self._of_document(batch.role, document, end - start), strict=True):
                    whole[row, start:end] = own
        return [whole.to(self.device, non_blocking=True) for whole in rows]

    def _of_document(self, role: SplitName, document: int, length: int) -> list[Tensor]:
        """K tensors [length, H] on the CPU."""
        layout = self._layouts[role]
        entry = layout.find(int(self._store.split(role).starts[document]))
        name, start = shard_name(role, int(layout.shards[entry])), int(layout.offsets[entry])
        end, place = start + int(layout.lengths[entry]), int(layout.places[entry])
        try:
            shard = self._shard(name)
            own = [shard.get_slice(f"layer_{tap}")[start:end] for tap in self.key.taps]
            is_whole = self._checked[role][entry] or checksum(own) == int(shard.get_slice("checksums")[place])
        except (OSError, SafetensorError) as error:
            raise self._damaged(name, str(error)) from error
        if not is_whole:
            raise self._damaged(name, f"the features of {role} document {document} are not what was written")
        self._checked[role][entry] = True
        return [own[i][:length] for i in self._places]

    def _damaged(self, name: str, how: str) -> FeaturesError:
        return FeaturesError(
            f"{self._folder / name} is damaged: {how}",
            fix=f"run `helixctl prepare RECIPE --features {self._folder}` again: it writes damaged shards anew",
        )

    def _shard(self, name: str) -> Any:
        if name in self._open:
            self._open.move_to_end(name)
        else:
            self._open[name] = safe_open(self._folder / name, "pt")
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        return self._open[name]


def checksum(features: Iterable[Tensor]) -> int:
    """CRC-32 of one document's features, K tensors [T, H] on the CPU, tap after tap."""
    value = 0
    for feature in features:
        value = zlib.crc32(feature.contiguous().view(torch.uint8).numpy().data, value)
    return value


def document_checksums(features: Sequence[Tensor], layout: SplitLayout, first: int, end: int) -> list[int]:
    """``checksum`` of each document of a shard, entries [first, end) of ``layout``; ``features`` K x [T, H]."""
    spans = zip(layout.offsets[first:end].tolist(), layout.lengths[first:end].tolist(), strict=True)
    return [checksum([feature[start : start + length] for feature in features]) for start, length in spans]
