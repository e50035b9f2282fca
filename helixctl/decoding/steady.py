"""Plain decoding at speed: a step is the same work whatever the rows hold, so that on a GPU it is one CUDA graph.

`rows.py` launches every operation of a step anew and asks for its tokens, which for a small model takes many times as
long as the work. Here tokens, positions and cache stay on the device and never move. The host queues `CHUNK_STEPS`
steps and then reads all their tokens at once (`steady_work.py`); what a row computes behind its answer's end is thrown
away.

On a CPU the same steps run one by one, which is for tests: `speculative.stream_plain` makes the batch shrink.

Legend: R rows, L positions of a row, C steps per chunk, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from helixctl.decoding.decoded import Decoded, DecodeOptions, DecodeProgress, clip
from helixctl.decoding.greedy import best_tokens
from helixctl.decoding.policy import DecodeTarget
from helixctl.decoding.rows import Row
from helixctl.decoding.sampling import Sampling, draw, probabilities
from helixctl.decoding.speculative import OnProgress, Prompts, make_rows
from helixctl.decoding.steady_work import Ready, SteadyWork, to_device
from helixctl.models.captured import Captured, GraphPool

CHUNK_STEPS = 8
"""Steps between two looks at the tokens: an answer that ends within them leaves its row idle for the rest."""
_ROWS_STEP = 8
_LENGTH_STEP = 128

_log = logging.getLogger(__name__)


class SteadyDecoder:
    """Answers sets of prompts one after the other; rows, cache and graph are kept as long as they fit.

    The answers are those of ``stream_plain``, up to rounding: which rows share a product may differ. For one thread.
    """

    def __init__(self, target: DecodeTarget) -> None:
        self.target = target
        self._rows: _Rows | None = None

    @torch.no_grad()
    def stream(
        self, prompts: Prompts, options: DecodeOptions, *, on_progress: OnProgress | None = None
    ) -> Iterator[tuple[int, Decoded]]:
        """Yield (index, answer) as answers are finished, in any order.

        Raises:
            UsageError: an empty prompt, or one that leaves no room for an answer.
        """
        assert not options.record_margins, "margins are read by losslessness.py, which decodes by rows.py"
        waiting = make_rows(prompts, options)
        if not waiting:
            return
        work = _Work(self._fitting(waiting, options), waiting, options, CHUNK_STEPS)
        num_done = num_tokens = 0
        while work.left:
            work.launch()
            finished = work.take_finished()  # the device works while they are written
            for row in finished:
                yield row.index, row.decoded()
            num_done += len(finished)
            num_tokens += sum(len(row.tokens) for row in finished)
            if on_progress is not None:
                on_progress(DecodeProgress(num_done, len(prompts), num_tokens + work.num_tokens))
            work.collect()

    def _fitting(self, waiting: Sequence[Row], options: DecodeOptions) -> _Rows:
        """The rows of before where they are enough and not twice too long, else new ones."""
        num_rows = min(options.batch_size, _up(len(waiting), _ROWS_STEP))
        length = _up(max(len(row.prompt) + row.limit for row in waiting), _LENGTH_STEP)
        rows = self._rows
        if rows is None or not rows.fits(num_rows, length, options):
            self._rows = None  # the old cache goes before the new one comes
            self._rows = _Rows(self.target, num_rows, length, options.sampling)
        assert self._rows is not None
        return self._rows


class _Rows:
    """What is on the device: R rows of a cache, where each stands, and the tokens of the last chunk."""

    def __init__(self, target: DecodeTarget, num_rows: int, length: int, sampling: Sampling | None) -> None:
        self.num_rows = num_rows
        self.length = length
        self.sampling = sampling
        device = target.device
        self.target = target
        self._cache = target.new_cache(num_rows, length)
        self._ids = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._tokens = torch.zeros(num_rows, CHUNK_STEPS, dtype=torch.int64, device=device)  # [R, C]
        self._uniforms = torch.zeros(num_rows, CHUNK_STEPS, device=device)  # [R, C], to sample with
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # column of the next step
        self._graph = self._capture() if device.type == "cuda" else None

    def fits(self, num_rows: int, length: int, options: DecodeOptions) -> bool:
        """Whether they can answer prompts that want so many rows of so many positions."""
        enough = num_rows <= self.num_rows <= options.batch_size
        return enough and length <= self.length <= 2 * length and self.sampling == options.sampling

    def put(self, places: Sequence[int], rows: Sequence[Row], ready: Ready, sources: Sequence[int]) -> None:
        """See ``FixedRows``."""
        index, source, tokens, starts = to_device(
            [places, sources, [row.anchor for row in rows], [row.start for row in rows]], self._ids.device
        )
        self._cache.put(index, ready.cache, source)
        self._ids[index, 0] = tokens
        self._positions[index, 0] = starts

    def launch(self, num_steps: int, uniforms: Sequence[Sequence[float]] | None) -> None:
        """Queue steps; ``uniforms`` [R, num_steps] where tokens are sampled."""
        self._place.zero_()
        if uniforms is not None:
            self._uniforms[:, :num_steps] = to_device(uniforms, self._ids.device, torch.float32)
        for _ in range(num_steps):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()

    def read(self, num_steps: int) -> list[list[int]]:
        """The tokens of the steps that were queued, [R, num_steps]; waits for them."""
        return self._tokens[:, :num_steps].tolist()  # the one look of a chunk: tokens decide what is next

    def _step(self) -> None:
        """One token per row. Changes nothing but the contents of tensors, and launches the same work every time."""
        self._cache.expect(self.length)
        logits, _ = self.target.decode_step(self._ids, self._positions, self._cache)  # [R, 1, V]
        if self.sampling is None:
            chosen = best_tokens(logits)  # [R, 1]
        else:
            uniforms = self._uniforms.index_select(1, self._place)  # [R, 1]
            chosen = draw(probabilities(logits, self.sampling), uniforms)
        self._tokens.index_copy_(1, self._place, chosen)
        self._ids.copy_(chosen)
        self._positions.add_(1).clamp_(max=self.length - 1)  # a row whose answer has ended stays at its own end
        self._place.add_(1)

    def _capture(self) -> Captured[None] | None:
        """The step as a CUDA graph; None, with a warning, where the model does what no graph can hold."""
        self._step()  # makes the cache's buffers
        self._place.zero_()
        try:
            return GraphPool(self.target.device).capture(self._step)
        except RuntimeError as error:
            _log.warning("the decoding step cannot be captured, decoding is slower: %s", str(error).splitlines()[0])
            return None
        finally:
            self._place.zero_()
            self._positions.zero_()


class _Work(SteadyWork):
    """One set of prompts on its way through the rows."""

    def _take(self, row: Row, found: list[int]) -> None:
        kept, row.finish = clip(found, row.room, self._options.stop_ids)
        row.tokens += kept
        row.accepted += [1] * len(kept)
        row.judged += [0] * len(kept)

    def _num_uniforms(self) -> int:
        return self._num_steps


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
