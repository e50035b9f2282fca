"""Prompts that take turns in rows of fixed shapes: what plain and speculative decoding at speed share.

The host queues a chunk of steps, lets finished answers be written meanwhile, and then reads what the chunk gave.
Prompts are prefilled ahead, many together, and take the rows of finished answers.

Legend: R rows, T positions of the longest prompt, K taps, H width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.greedy import best_tokens
from helixctl.decoding.policy import DecodeTarget, RowCache, padded_rows
from helixctl.decoding.rows import PREFILL_TOKENS, Row
from helixctl.decoding.sampling import sample_tokens


@dataclass(frozen=True)
class Ready:
    """Prompts that were prefilled together."""

    cache: RowCache
    features: Sequence[Tensor]  # K x [rows, T, H]
    width: int  # T


class FixedRows(Protocol):
    """What is on the device: R rows of a cache, and the tokens of the last chunk."""

    @property
    def num_rows(self) -> int:
        """R."""

    @property
    def target(self) -> DecodeTarget:
        """Whose answers these are."""

    def put(self, places: Sequence[int], rows: Sequence[Row], ready: Ready, sources: Sequence[int]) -> None:
        """Rows ``places`` go on with the prompts ``sources`` of ``ready``."""

    def launch(self, num_steps: int, uniforms: Sequence[Sequence[float]] | None) -> None:
        """Queue steps; ``uniforms`` [R, ...] where tokens are sampled."""

    def read(self, num_steps: int) -> Sequence[Any]:
        """What the queued steps gave, per row; waits for them."""


class SteadyWork(ABC):
    """One set of prompts on its way through the rows."""

    def __init__(self, rows: FixedRows, waiting: Sequence[Row], options: DecodeOptions, chunk: int) -> None:
        """``chunk`` steps lie between two looks at the tokens."""
        self._rows = rows
        self._options = options
        self._chunk = chunk
        self._waiting = deque(waiting)
        self._ready: Ready | None = None
        self._ready_rows: deque[tuple[int, Row]] = deque()
        """Prefilled, with their place in ``_ready``."""
        self._active: dict[int, Row] = {}
        """By row."""
        self._finished: list[Row] = []
        self._num_steps = 0

    @property
    def left(self) -> bool:
        """Whether an answer is missing, or has not been taken."""
        return bool(self._waiting or self._ready_rows or self._active or self._finished)

    @property
    def num_tokens(self) -> int:
        """Tokens of answers that have not been taken."""
        return sum(len(row.tokens) for row in (*self._active.values(), *self._finished))

    def take_finished(self) -> list[Row]:
        """Rows whose answer is finished, once each."""
        finished, self._finished = self._finished, []
        return finished

    def launch(self) -> None:
        """Give idle rows to the next prompts, and queue a chunk."""
        self._fill()
        self._num_steps = min(self._chunk, max((row.room for row in self._active.values()), default=0))
        if self._num_steps:
            self._rows.launch(self._num_steps, self._draw_uniforms() if self._options.sampling else None)

    def collect(self) -> None:
        """Read what the chunk gave."""
        if not self._num_steps:
            return
        found = self._rows.read(self._num_steps)
        for place, row in list(self._active.items()):
            self._take(row, found[place])
            if row.finish is not None:
                self._finished.append(self._active.pop(place))

    @abstractmethod
    def _take(self, row: Row, found: Any) -> None:
        """Add what the chunk gave to a row, up to the end of its answer."""

    @abstractmethod
    def _num_uniforms(self) -> int:
        """Random numbers that a row may need in the chunk."""

    def _fill(self) -> None:
        idle = [place for place in range(self._rows.num_rows) if place not in self._active]
        while idle and (self._ready_rows or self._waiting):
            if not self._ready_rows:
                self._prefill()
            count = min(len(idle), len(self._ready_rows))
            if not count:
                continue  # all of them ended with their first token
            taken = [self._ready_rows.popleft() for _ in range(count)]
            places, idle = idle[:count], idle[count:]
            assert self._ready is not None
            self._rows.put(places, [row for _, row in taken], self._ready, [source for source, _ in taken])
            self._active.update(zip(places, (row for _, row in taken), strict=True))

    def _prefill(self) -> None:
        """One forward over the next prompts, padded on the right; emits their first tokens."""
        target, sampling = self._rows.target, self._options.sampling
        width = len(self._waiting[0].prompt)  # the longest come first
        count = min(len(self._waiting), self._rows.num_rows, max(1, PREFILL_TOKENS // width))
        rows = [self._waiting.popleft() for _ in range(count)]
        input_ids, lengths = padded_rows([row.prompt for row in rows], target.device)
        positions = torch.arange(width, device=input_ids.device).expand(count, width)
        cache = target.new_cache(count, width)
        cache.expect(width)
        logits, features = target.decode_step(input_ids, positions, cache, logits_at=lengths - 1)
        self._ready = Ready(cache, features, width)
        if sampling is None:
            first = best_tokens(logits)[:, 0]
        else:
            first = sample_tokens(logits[:, -1], sampling, [row.generator for row in rows])
        for source, (row, token) in enumerate(zip(rows, first.tolist(), strict=True)):  # a look per prefill
            row.emit([token], (), self._options.stop_ids, 0)
            if row.finish is None:
                self._ready_rows.append((source, row))
            else:
                self._finished.append(row)

    def _draw_uniforms(self) -> list[list[float]]:
        """The next numbers of every row's own generator; those behind an answer's end are never missed."""
        nothing = [0.0] * self._num_uniforms()
        return [
            [self._active[place].generator.random() for _ in nothing] if place in self._active else nothing
            for place in range(self._rows.num_rows)
        ]


def to_device(numbers: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Host numbers as a tensor; pinned, since a copy from any other memory waits for the device."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
