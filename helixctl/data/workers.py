"""prepare's processes: chunks of raw pieces in, documents out, in order, with a bounded number under way."""

from __future__ import annotations

import ctypes
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

from helixctl.data.documents import Document, DocumentMaker, DocumentOptions
from helixctl.data.fingerprint import load_fast_tokenizer
from helixctl.data.records import Bad, Piece
from helixctl.engine.interrupt import interrupts_blocked
from helixctl.errors import DataError
from helixctl.plugins import FORMATS, load_plugin
from helixctl.recipe.causal_lm import ModelOptions
from helixctl.recipe.schema import SourceOptions, TargetOptions

_CHUNKS_AHEAD = 2
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in linux/prctl.h


@dataclass(frozen=True)
class Chunk:
    """Neighbouring pieces of one source."""

    source: int
    """Place of the source in prepare's list."""
    options: SourceOptions
    held_out: bool
    pieces: tuple[Piece, ...]
    num_bytes: int
    """Bytes of all sources read when the chunk was complete."""


@dataclass(frozen=True)
class ChunkResult:
    """What became of a chunk's pieces, in their order."""

    source: int
    num_bytes: int
    outcomes: tuple[Document | Bad, ...]


ChunkMap = Callable[[Iterable[Chunk]], Iterator[ChunkResult]]


@contextmanager
def open_workers(num_workers: int, model: TargetOptions | ModelOptions, options: DocumentOptions) -> Iterator[ChunkMap]:
    """A function that maps chunks to results in order; 0 workers: in this process.

    On leaving, chunks that have not begun are forgotten and the processes have ended. They are started by spawn, see
    no Ctrl-C of their own, and end with this process even if it is killed.

    Raises:
        DataError: a process died (usually for want of memory).
    """
    if num_workers == 0:
        maker = DocumentMaker(load_fast_tokenizer(model), options)
        yield lambda chunks: (make_documents(maker, chunk) for chunk in chunks)
        return
    executor = ProcessPoolExecutor(
        num_workers, get_context("spawn"), initializer=_start_worker, initargs=(os.getpid(), model, options)
    )
    try:
        yield lambda chunks: _map_in_order(executor, chunks, num_workers + _CHUNKS_AHEAD)
    except BrokenProcessPool as error:
        text = "a process of prepare ended before its work was done"
        raise DataError(text, fix="see its message above; if memory ran out, set data.workers lower") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def make_documents(maker: DocumentMaker, chunk: Chunk) -> ChunkResult:
    """Parse and tokenise every piece of a chunk."""
    parse = load_plugin(FORMATS, chunk.options.format).parse
    outcomes = tuple(maker.make(parse(piece, chunk.options), held_out=chunk.held_out) for piece in chunk.pieces)
    return ChunkResult(chunk.source, chunk.num_bytes, outcomes)


def _map_in_order(executor: ProcessPoolExecutor, chunks: Iterable[Chunk], ahead: int) -> Iterator[ChunkResult]:
    pending: deque[Future[ChunkResult]] = deque()
    for chunk in chunks:
        with interrupts_blocked():  # a process started here inherits the mask: Ctrl-C is the parent's business
            pending.append(executor.submit(_work, chunk))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


_maker: DocumentMaker | None = None
"""The one of this worker process; pools hand state to tasks in no other way."""


def _start_worker(parent: int, model: TargetOptions | ModelOptions, options: DocumentOptions) -> None:
    global _maker
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker = DocumentMaker(load_fast_tokenizer(model), options)


def _work(chunk: Chunk) -> ChunkResult:
    assert _maker is not None, "_start_worker ran"
    return make_documents(_maker, chunk)
