"""Loaders for causal language models whose workers cannot deadlock: spawned or from a clean server, never forked.

A fork copies every lock as it stands and only one thread; whatever another thread held stays locked in the child for
ever, and the loop waits at 0 %. Typically it is the *validation* loader that hangs: its workers start when CUDA, the
pin-memory thread and others are under way. Hence: no fork at all, and ``val_num_workers`` is 0 unless asked for.

Workers are told apart from the main process by nothing but what is pickled to them, checked up front. A batch that
does not come raises ``LoaderStalled`` with the stacks of all processes. Nothing here touches CUDA but ``pin_memory``.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.context
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from helixctl.data.document_set import BatchOrder, WindowDataset
from helixctl.data.streaming import Stream, StreamDataset
from helixctl.data.token_batch import Place, TokenBatch
from helixctl.data.window_set import Documents
from helixctl.data.windows import ALONE, Shard, WindowOptions
from helixctl.data.worker_pickle import check_picklable
from helixctl.data.worker_process import WorkerStart, as_it_is, make_socket_folder, watch
from helixctl.errors import DataError, UsageError

Role = Literal["train", "validation"]
StartMethod = Literal["spawn", "forkserver"]
START_METHODS: tuple[StartMethod, ...] = ("spawn", "forkserver")
_LARGE_BYTES = 64 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerOptions:
    """Processes that make batches.

    ``num_workers`` are those of the training loader; they stay alive from epoch to epoch. ``val_num_workers`` are
    those of the validation loader, started anew for every pass; None means 0: validation batches are made in the main
    process, which costs a little time and cannot stall.
    """

    num_workers: int = 0
    val_num_workers: int | None = None
    start_method: StartMethod = "spawn"
    """spawn: a fresh interpreter each, seconds per worker. forkserver: forks of one clean process that has imported
    everything, seconds once and milliseconds per worker; its environment is that of its first start. Linux only."""
    timeout_s: float = 300.0
    """Longest wait for a batch, start of the workers included; then LoaderStalled."""
    batches_ahead: int = 2
    """Batches that each worker may be ahead."""
    pin_memory: bool = False
    """Copy batches into page-locked memory, in the main process; starts CUDA there."""

    def count(self, role: Role) -> int:
        """Workers of the loader for ``role``."""
        return self.num_workers if role == "train" else (self.val_num_workers or 0)


def build_loader(
    dataset: Dataset[Any], role: Role, workers: WorkerOptions, start: WorkerStart, sampler: BatchOrder | None = None
) -> DataLoader[Any]:
    """The one place that makes a DataLoader; ``dataset`` yields whole batches.

    Raises:
        UsageError: a start method other than spawn and forkserver, something that does not pickle, or a call while a
            worker imports the script.
    """
    if workers.start_method not in START_METHODS:
        text = f"workers are never started by {workers.start_method}: locks held by other threads stay locked for ever"
        raise UsageError(text, fix="use spawn, or forkserver where start-up time matters")
    num_workers = workers.count(role)
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        collate_fn=as_it_is,
        pin_memory=workers.pin_memory,
        # Draws the seed of workers; without it the loader would take a number from the generator that training uses.
        generator=torch.Generator().manual_seed(0),
        num_workers=num_workers,
        # torch refuses all of these where there are no workers.
        multiprocessing_context=_make_context(dataset, workers, num_workers, start) if num_workers else None,
        worker_init_fn=start if num_workers else None,
        persistent_workers=num_workers > 0 and role == "train",
        prefetch_factor=workers.batches_ahead if num_workers else None,
        timeout=workers.timeout_s if num_workers else 0,
    )


def _make_context(
    dataset: Dataset[Any], workers: WorkerOptions, num_workers: int, start: WorkerStart
) -> multiprocessing.context.BaseContext:
    """How worker processes begin, once nothing is known that would make them fail."""
    _check_start(dataset, num_workers, start)
    make_socket_folder()
    context = multiprocessing.get_context(workers.start_method)
    if workers.start_method == "forkserver":
        context.set_forkserver_preload(_preloaded(dataset))
    return context


def _check_start(dataset: Dataset[Any], num_workers: int, start: WorkerStart) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        text = "worker processes are being started while a worker imports this script"
        raise UsageError(text, fix='put what the script does under `if __name__ == "__main__":`')
    num_bytes = check_picklable(dataset=dataset, collate_fn=as_it_is, worker_init_fn=start)
    if num_bytes > _LARGE_BYTES:
        _log.warning("each of %d workers gets a dataset of %d MB pickled", num_workers, num_bytes >> 20)
    cores = max(1, len(os.sched_getaffinity(0)) // _num_processes())
    if num_workers > cores:
        _log.warning("%d workers for %d cores: more do not load faster", num_workers, cores)


def _num_processes() -> int:
    """Of this run on this host, which share its cores; torchrun says so."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(told)) if told.isdecimal() else 1


def _preloaded(dataset: Dataset[Any]) -> list[str]:
    """What the server imports once, for all workers; a module that cannot be imported there is imported later."""
    own = type(dataset).__module__
    more = getattr(dataset, "worker_modules", ())
    return ["torch", WorkerStart.__module__, *([own] if own != "__main__" else []), *more]


class DocumentLoader:
    """Batches of one epoch per iteration, from documents that can be reached by number.

    An iteration goes on where the last one ended, also in the middle of an epoch; ``set_epoch`` begins one anew.
    """

    def __init__(
        self,
        dataset: WindowDataset,
        role: Role = "train",
        workers: WorkerOptions = WorkerOptions(),
        shard: Shard = ALONE,
    ) -> None:
        self._dataset = dataset
        self._role: Role = role
        self._workers = workers
        self._shard = shard
        self._order = BatchOrder(dataset.windows, shard, shuffle=role == "train")
        start = WorkerStart((dataset.options.seed, dataset.options.stage, shard.rank))
        self._loader = build_loader(dataset, role, workers, start, self._order)
        self._epoch = 0
        self._done = 0

    @property
    def counts(self) -> Mapping[str, int]:
        """What the documents gave: ``windows``, and what was left out (``tail_tokens``, ``too_short``)."""
        return {"windows": len(self._dataset), **self._dataset.counts}

    def __len__(self) -> int:
        """Batches of this rank per epoch."""
        return self._order.num_batches

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is ``epoch``, from its first batch."""
        self._epoch, self._done = epoch, 0

    def __iter__(self) -> Iterator[TokenBatch]:
        self._order.begin(self._epoch, self._done)
        for batch in watch(self._loader, self._workers.timeout_s, self._role):
            self._done += 1
            if self._done == len(self):
                self._epoch, self._done = self._epoch + 1, 0
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: behind the last batch that was handed out, not the last that was made."""
        return {"epoch": self._epoch, "done": self._done, "data": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            DataError: it was taken over other documents or with other options; says which.
        """
        _check_identity(state, self._identity())
        self._epoch, self._done = int(state["epoch"]), int(state["done"])

    def _identity(self) -> dict[str, Any]:
        return {**vars(self._dataset.options), "windows": len(self._dataset), "world_size": self._shard.world_size}


class StreamLoader:
    """Batches of one epoch per iteration, read while they are used; the next iteration is the next epoch.

    After a break in the middle of an epoch the next iteration goes on there, with fresh workers.
    """

    def __init__(
        self,
        stream: Stream,
        options: WindowOptions,
        role: Role = "train",
        workers: WorkerOptions = WorkerOptions(),
        shard: Shard = ALONE,
    ) -> None:
        self._dataset = StreamDataset(stream, options, shard)
        self._options = options
        self._role: Role = role
        self._workers = workers
        self._shard = shard
        self._num_lanes = max(1, workers.count(role))
        self.counts: Counter[str] = Counter()
        """What became of the documents so far: ``documents``, ``tail_tokens``, ``too_short``, and drops by reason."""
        self._epoch = 0
        self._places: dict[int, Place] = {}
        self._next_lane = 0
        self._living_epoch: int | None = None  # what living workers would do next
        self._loader = self._build()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is ``epoch``, from its beginning."""
        self._epoch, self._places, self._next_lane = epoch, {}, 0

    def __iter__(self) -> Iterator[TokenBatch]:
        if self._places or self._living_epoch != self._epoch:
            self._dataset.begin(self._epoch, self._places, self._next_lane)
            self._loader = self._build()  # living workers would go on elsewhere; the old loader ends them
        is_living = self._workers.count(self._role) > 0 and self._role == "train"
        self._living_epoch = self._epoch + 1 if is_living else None
        for batch in watch(self._loader, self._workers.timeout_s, self._role):
            assert batch.place is not None
            self.counts.update(batch.counts)
            self._places[batch.lane] = batch.place
            self._next_lane = (batch.lane + 1) % self._num_lanes
            if batch.num_rows:  # else it only brought the last counts of a lane
                yield batch
        self.set_epoch(self._epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, to the document and its token: behind the last batch that was handed out."""
        places = {lane: tuple(place) for lane, place in self._places.items()}
        own = {"epoch": self._epoch, "places": places, "next_lane": self._next_lane, "counts": dict(self.counts)}
        return {**own, "data": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            DataError: it was taken with other options, or with another number of workers or ranks; says which.
        """
        _check_identity(state, self._identity())
        self._epoch, self._next_lane = int(state["epoch"]), int(state["next_lane"])
        self._places = {int(lane): Place(*place) for lane, place in state["places"].items()}
        self.counts = Counter(state["counts"])
        self._living_epoch = None

    def _identity(self) -> dict[str, Any]:
        return {**vars(self._options), "workers": self._num_lanes, **vars(self._shard)}

    def _build(self) -> DataLoader[Any]:
        start = WorkerStart((self._options.seed, self._options.stage, self._shard.rank))
        return build_loader(self._dataset, self._role, self._workers, start)


def create_document_loader(
    documents: Documents,
    options: WindowOptions,
    *,
    role: Role = "train",
    workers: WorkerOptions = WorkerOptions(),
    shard: Shard = ALONE,
) -> DocumentLoader:
    """A loader over tokenised documents (``StoredDocuments``, ``ListedDocuments``): any window at any time.

    Raises:
        DataError: the documents fill no window.
        UsageError: see ``build_loader``.
    """
    return DocumentLoader(WindowDataset(documents, options, shuffle=role == "train"), role, workers, shard)


def create_streaming_loader(
    stream: Stream,
    options: WindowOptions,
    *,
    role: Role = "train",
    workers: WorkerOptions = WorkerOptions(),
    shard: Shard = ALONE,
) -> StreamLoader:
    """A loader over source files that are read and tokenised while they are used.

    Raises:
        UsageError: see ``build_loader``.
    """
    return StreamLoader(stream, options, role, workers, shard)


def _check_identity(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    before = state["data"]
    differing = [f"{name} {before.get(name)} -> {own[name]}" for name in own if before.get(name) != own[name]]
    if differing:
        text = f"the loader's state was taken with other options: {', '.join(differing)}"
        raise DataError(text, fix="resume with the options of the run, or begin the data anew")
