"""`prepare --features`: the target runs over every document once, and its taps go to disk.

    target-i --shards--> writer-i

Every target loop takes the next shard that is missing, runs its documents, and hands the features to its writer, which
puts the file in place in one rename. So a killed `prepare` loses at most the shards in work, and goes on with the
others.

Documents go through one at a time where a run that caches features takes them so: then both have the same bits. Where
a run compiles the target, whose rows differ from single documents in rounding anyway, as many of a shard's go through
together as the plan has memory for: short documents alone leave a GPU waiting for its launches.

Legend: T tokens of a shard, K taps, H target width.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from helixctl.checkpoint.atomic import explained, remove_leftovers, sync, temporary_name, write_json
from helixctl.data.batch import make_row_batch
from helixctl.data.fingerprint import check_tokenizer, load_fast_tokenizer
from helixctl.data.store import Store
from helixctl.data.stored_features import (
    MANIFEST,
    SHARD_BYTES,
    FeatureKey,
    FeatureManifest,
    FeaturesError,
    Shard,
    choose_shard_tokens,
    differences,
    find_features,
    list_shards,
    make_layouts,
)
from helixctl.engine.channel import Channel
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.supervisor import Limits, Progress, Supervisor
from helixctl.errors import Interrupted, UsageError
from helixctl.models.identity import fingerprint_weights
from helixctl.models.loading import choose_backend
from helixctl.models.target import Target
from helixctl.plan import Plan
from helixctl.training.process import set_up_process
from helixctl.training.stored import document_checksums, feature_key

_MARGIN = 0.02
"""Of the predicted bytes, left free on the disk."""
_SHOW_EVERY_S = 0.2


@dataclass(frozen=True)
class Forecast:
    """What storing features will cost, before anything is loaded."""

    folder: Path
    documents: int
    tokens: int
    num_bytes: int
    """Of all features; headers and checksums come to a thousandth of it."""
    missing_bytes: int
    """Of the shards that are not there yet."""
    free_bytes: int
    """On the disk."""


@dataclass(frozen=True)
class CaptureResult:
    """What is in the folder now."""

    folder: str
    shards: int
    written: int
    """Shards of this run; the others were there."""
    documents: int
    tokens: int
    num_bytes: int


class Capture:
    """One folder of features in the making."""

    def __init__(self, plan: Plan, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Looks at store and folder; loads and writes nothing.

        Raises:
            DataError: no store, one made with another tokenizer, or a folder that holds something else.
            UsageError: several processes.
        """
        if plan.world.size > 1:
            raise UsageError("prepare --features is one process", fix="run it without torchrun: it uses every GPU")
        self.plan = plan
        self.folder = folder
        self.store = Store.open(plan.recipe.data.store)
        check_tokenizer(self.store, load_fast_tokenizer(plan.recipe.target))
        self.key = feature_key(plan, self.store)
        self.shard_tokens = choose_shard_tokens(self.store, self.key, shard_bytes)
        known = self._known()
        if known is not None:
            self.key, self.shard_tokens = known.key, known.shard_tokens
        self.layouts = make_layouts(self.store, self.key.seq_len, self.shard_tokens)
        self.shards = tuple(list_shards(self.layouts))
        finished = known is not None and known.complete
        self.missing = [shard for shard in self.shards if not self._is_whole(shard, read_all=finished)]

    def forecast(self) -> Forecast:
        """The cost, and the room there is."""
        place = next(parent for parent in (self.folder, *self.folder.absolute().parents) if parent.exists())
        tokens = sum(shard.num_tokens for shard in self.shards)
        return Forecast(
            folder=self.folder,
            documents=sum(shard.end - shard.first for shard in self.shards),
            tokens=tokens,
            num_bytes=tokens * self.key.token_bytes,
            missing_bytes=sum(shard.num_tokens for shard in self.missing) * self.key.token_bytes,
            free_bytes=shutil.disk_usage(place).free,
        )

    def claim(self, target: Target) -> None:
        """Tie the folder to the weights of ``target``; every target loop calls it once it is loaded.

        Raises:
            FeaturesError: the folder was begun with other weights.
        """
        key = replace(self.key, weights=fingerprint_weights(target.model))
        _refuse_other(self.folder, self.key, key)
        if not self.key.weights:
            self.key = key
            write_json(self.folder / MANIFEST, FeatureManifest(key, self.shard_tokens, {}).to_json())

    def write(self, shard: Shard, features: Sequence[Tensor]) -> None:
        """Put one shard in place. ``features`` are K x [T, H] on the CPU.

        Raises:
            CheckpointError: the disk is full or not writable.
        """
        sums = document_checksums(features, self.layouts[shard.split], shard.first, shard.end)
        tensors = {f"layer_{tap}": feature for tap, feature in zip(self.key.taps, features, strict=True)}
        final = self.folder / shard.name
        temporary = temporary_name(final)
        try:
            with explained(f"cannot write {final}"):
                save_file(tensors | {"checksums": torch.tensor(sums)}, temporary, {"key": self.key.digest})
                sync(temporary)
                temporary.replace(final)
                sync(self.folder)
        finally:
            temporary.unlink(missing_ok=True)

    def finish(self) -> CaptureResult:
        """Say that the folder is complete."""
        sizes = {shard.name: (self.folder / shard.name).stat().st_size for shard in self.shards}
        write_json(self.folder / MANIFEST, FeatureManifest(self.key, self.shard_tokens, sizes).to_json())
        return CaptureResult(
            folder=str(self.folder),
            shards=len(self.shards),
            written=len(self.missing),
            documents=sum(shard.end - shard.first for shard in self.shards),
            tokens=sum(shard.num_tokens for shard in self.shards),
            num_bytes=sum(sizes.values()),
        )

    def _known(self) -> FeatureManifest | None:
        """What an earlier `prepare` began in this folder."""
        known = find_features(self.folder)
        if known is not None:
            _refuse_other(self.folder, known.key, self.key)
        return known

    def _is_whole(self, shard: Shard, *, read_all: bool) -> bool:
        """Whether the file is there, of this target and these documents; ``read_all`` compares checksums, too."""
        path, layout = self.folder / shard.name, self.layouts[shard.split]
        if not path.is_file():
            return False
        try:
            with safe_open(path, "pt") as file:  # refuses a file that is shorter or longer than its header says
                if (file.metadata() or {}).get("key") != self.key.digest:
                    return False
                names = [f"layer_{tap}" for tap in self.key.taps]
                if any(file.get_slice(name).get_shape() != [shard.num_tokens, self.key.width] for name in names):
                    return False
                if not read_all:
                    return True
                features = [file.get_tensor(name) for name in names]
                written = file.get_tensor("checksums").tolist()
                return bool(document_checksums(features, layout, shard.first, shard.end) == written)
        except (OSError, SafetensorError):
            return False


def run_capture(capture: Capture, on_progress: Callable[[int, int], None] = lambda done, total: None) -> CaptureResult:
    """Write the shards that are missing. ``on_progress`` gets tokens done and tokens in all.

    Raises:
        UsageError: the disk has no room for what is missing.
        FeaturesError: another `prepare` writes there, or the folder was begun with other weights.
        StageFailed: a target or a writer raised; its exception is the cause.
        Interrupted: the user stopped it; whole shards stay.
    """
    refuse_lack_of_room(capture.forecast())
    set_up_process(capture.plan)
    with _locked(capture.folder), InterruptFlag() as interrupt:
        remove_leftovers(capture.folder)
        if capture.missing:
            _run_stages(capture, interrupt, on_progress)
        return capture.finish()


def refuse_lack_of_room(forecast: Forecast) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        UsageError: says how much is needed, and how much there is.
    """
    needed = forecast.missing_bytes * (1 + _MARGIN)
    if needed > forecast.free_bytes:
        raise UsageError(
            f"features need {needed / 2**20:,.1f} MiB in {forecast.folder}, its disk has "
            f"{forecast.free_bytes / 2**20:,.1f} MiB free",
            fix="free space, name a folder on another disk, lower data.seq_len, or tap fewer layers (drafter.num_taps)",
        )


def _run_stages(capture: Capture, interrupt: InterruptFlag, on_progress: Callable[[int, int], None]) -> None:
    plan = capture.plan
    shards = _Missing(capture.missing)
    captures: list[_TargetStage] = []
    writers: list[_WriterStage] = []
    for i, device in enumerate(dict.fromkeys(plan.target_devices)):
        channel: Channel[tuple[Shard, list[Tensor]]] = Channel(f"target-{i}-out", 1)
        captures.append(_TargetStage(f"target-{i}", capture, torch.device(device), (shards, channel, interrupt)))
        writers.append(_WriterStage(f"writer-{i}", capture, channel))
    options, progress = plan.recipe.pipeline, Progress()
    total = sum(shard.num_tokens for shard in capture.missing)
    progress.listen(lambda: on_progress(sum(stage.num_tokens for stage in captures), total), _SHOW_EVERY_S)
    for stage in captures:
        stage.progress = progress
    limits = Limits(options.start_timeout_s, options.stall_timeout_s)
    channels = [stage.outbox for stage in captures]
    try:
        Supervisor([captures, writers], channels, limits, progress=progress, interrupt=interrupt).run()
    except Interrupted as error:
        fix = f"go on with the same command; {capture.folder} keeps its whole shards"
        raise Interrupted(error.exit_code - 128, error.message, fix=fix) from None
    on_progress(total, total)


class _Missing:
    """Hands shards out to several target loops."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = iter(shards)
        self._lock = threading.Lock()

    def take(self) -> Shard | None:
        with self._lock:
            return next(self._shards, None)


class _TargetStage:
    """Runs the target over the documents of a shard, one at a time."""

    def __init__(
        self,
        name: str,
        capture: Capture,
        device: torch.device,
        wires: tuple[_Missing, Channel[tuple[Shard, list[Tensor]]], InterruptFlag],
    ) -> None:
        self.name = name
        self.num_tokens = 0
        self.progress = Progress()
        self.shards, self.outbox, self.interrupt = wires
        self._capture = capture
        self._device = device
        self._target: Target | None = None
        self._together = _tokens_together(capture.plan, device)

    def setup(self) -> None:
        """Load the weights; the attention is that of the feature cache, so that both give the same bits."""
        plan = self._capture.plan
        options = plan.recipe.target.model_copy(update={"attention": "segments"})
        dtype = getattr(torch, self._capture.key.dtype)
        self._target = Target.load(options, plan.target_layer_ids, self._device, dtype)
        self._capture.claim(self._target)

    def run(self) -> None:
        """Until no shard is missing, or the user wants to stop."""
        while (shard := self.shards.take()) is not None:
            rows = list(self._rows(shard))
            if self.interrupt.requested:
                break
            # One transfer per shard: rows wait on the device until theirs are all there.
            self.outbox.send((shard, [torch.cat(parts).cpu() for parts in zip(*rows, strict=True)]))
        self.outbox.close()

    def teardown(self) -> None:
        """Let go of the weights."""
        self._target = None

    def _rows(self, shard: Shard) -> Iterator[list[Tensor]]:
        """K tensors [tokens, H] of every row of documents, in order."""
        assert self._target is not None
        layout, split = self._capture.layouts[shard.split], self._capture.store.split(shard.split)
        for first, end in split_rows(layout.lengths[shard.first : shard.end].tolist(), self._together):
            if self.interrupt.requested:
                return
            documents = []
            for entry in range(shard.first + first, shard.first + end):
                ids = split.tokens(int(layout.documents[entry]))[: int(layout.lengths[entry])]
                documents.append(torch.from_numpy(ids.astype("int64")))
            batch, last = make_row_batch(documents), self._capture.plan.last_hidden
            yield [feature[0] for feature in self._target.features(batch, last_hidden=last)]
            self.num_tokens += batch.num_tokens
            self.progress.beat(self.name)


class _WriterStage:
    """Writes shards while the target computes the next."""

    def __init__(self, name: str, capture: Capture, inbox: Channel[tuple[Shard, list[Tensor]]]) -> None:
        self.name = name
        self._capture = capture
        self._inbox = inbox

    def setup(self) -> None:
        """Nothing to load."""

    def run(self) -> None:
        """Until the target is done."""
        for shard, features in self._inbox:
            self._capture.write(shard, features)

    def teardown(self) -> None:
        """Nothing to release."""


def split_rows(lengths: Sequence[int], most_tokens: int) -> Iterator[tuple[int, int]]:
    """[first, end) of neighbours that together have at most ``most_tokens`` tokens; a longer document is alone."""
    first = num_tokens = 0
    for place, length in enumerate(lengths):
        if place > first and num_tokens + length > most_tokens:
            yield first, place
            first, num_tokens = place, 0
        num_tokens += length
    if lengths:
        yield first, len(lengths)


def _tokens_together(plan: Plan, device: torch.device) -> int:
    """Most tokens of documents that share a forward; 0 where each is alone."""
    if plan.target.recurrent or choose_backend(plan.recipe.target, plan.target, device) != "flex":
        return 0
    return plan.recipe.train.micro_batch_rows * plan.recipe.data.seq_len


def _refuse_other(folder: Path, stored: FeatureKey, wanted: FeatureKey) -> None:
    found = differences(stored, wanted)
    if stored.seq_len > wanted.seq_len:
        found.append(f"documents cut at {stored.seq_len} tokens, not {wanted.seq_len}")
    if not found and stored.taps != wanted.taps:
        found.append(f"taps {stored.taps}, not {wanted.taps}")
    if found:
        raise FeaturesError(
            f"{folder} holds features of something else: {'; '.join(found)}",
            fix="name another folder, or delete this one",
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder and hold it for this process."""
    with explained(f"cannot write features to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            fix = "wait for it, or name another folder"
            raise FeaturesError(f"another prepare writes to {folder}", fix=fix) from error
        yield
    finally:
        os.close(handle)
