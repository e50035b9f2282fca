"""Speculative decoding at speed: a cycle is the same work whatever the rows hold, so that on a GPU it is one graph.

As `steady.py` does for plain decoding: anchors, positions and caches stay on the device and never move; the host queues
`CHUNK_CYCLES` cycles - draft, verify, accept, give the drafter its features - and then reads all their tokens at once.
What a row computes behind its answer's end is thrown away, and behind the place where its drafter's confidence cuts its
block: the shape stays. `speculative.py` is the slow and obvious loop.

Legend: R rows, L positions of a row, C cycles per chunk, B block_size, T tokens per row, K taps, H width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from helixctl.decoding.confidence import Confidence
from helixctl.decoding.decoded import Decoded, DecodeOptions, DecodeProgress
from helixctl.decoding.greedy import accepted_drafts, best_tokens
from helixctl.decoding.policy import Choose, DecodeTarget, DraftCall, DraftPolicy, TreePolicy
from helixctl.decoding.rows import Row
from helixctl.decoding.sampling import SampledBlock, Sampling
from helixctl.decoding.speculative import OnProgress, Prompts, check_block_size, make_rows
from helixctl.decoding.steady_work import Ready, SteadyWork, to_device
from helixctl.decoding.tree import TreeShape, Verified, cycle_span, draft_tree, tree_policy, tree_shape, verify_tree

CHUNK_CYCLES = 4
"""Cycles between two looks at the tokens: an answer that ends within them leaves its row idle for the rest."""
_LENGTH_STEP = 128

_log = logging.getLogger(__name__)


class SteadySpeculator:
    """Answers sets of prompts with a drafter; rows, caches and graph are kept as long as they fit.

    The answers are those of ``decode_speculative``: greedy ones up to rounding, sampled ones from the same
    distribution. For one thread.
    """

    def __init__(self, target: DecodeTarget, policy: DraftPolicy) -> None:
        self._target = target
        self._policy = policy
        self._rows: _Rows | None = None

    @torch.no_grad()
    def decode(
        self, prompts: Prompts, options: DecodeOptions, *, on_progress: OnProgress | None = None
    ) -> list[Decoded]:
        """One answer per prompt, in order.

        Raises:
            UsageError: as ``decode_speculative``.
        """
        assert not options.record_margins, "margins are read by losslessness.py, which decodes by rows.py"
        block_size = check_block_size(options, self._policy)
        tree_policy(options, self._policy)  # refuses what cannot be
        waiting = make_rows(prompts, options)
        if not waiting:
            return []
        work = _Work(self._fitting(waiting, options, block_size), waiting, options)
        done: dict[int, Decoded] = {}
        num_tokens = 0
        while work.left:
            work.launch()
            for row in work.take_finished():  # the device works meanwhile
                done[row.index] = row.decoded()
                num_tokens += len(row.tokens)
            if on_progress is not None:
                on_progress(DecodeProgress(len(done), len(prompts), num_tokens + work.num_tokens))
            work.collect()
        return [done[index] for index in range(len(prompts))]

    def _fitting(self, waiting: Sequence[Row], options: DecodeOptions, block_size: int) -> _Rows:
        """The rows of before where they are as many and long enough, else new ones."""
        span = cycle_span(options, block_size)
        longest = max(len(row.prompt) + row.limit for row in waiting) + span
        length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
        trees = tree_shape(options, block_size)
        num_rows, threshold = min(options.batch_size, len(waiting)), options.confidence_threshold
        shape = _Shape(num_rows, length, block_size, span, trees, threshold)
        if self._rows is None or not self._rows.fits(shape, options.sampling):
            self._rows = None  # the old caches go before the new ones come
            self._rows = _Rows(self._target, self._policy, shape, options.sampling)
        return self._rows


@dataclass(frozen=True)
class _Shape:
    """R, L and B; places that a cycle may write; how trees are drafted, and where blocks are cut, if they are."""

    num_rows: int
    length: int
    block_size: int
    span: int
    trees: TreeShape | None
    threshold: float | None


class _Rows:
    """What is on the device: R rows of both caches, where each stands, and the tokens of the last chunk."""

    def __init__(self, target: DecodeTarget, policy: DraftPolicy, shape: _Shape, sampling: Sampling | None) -> None:
        self.shape = shape
        self.target = target
        self.sampling = sampling
        self._policy = policy
        num_rows, size, device = shape.num_rows, shape.block_size, target.device
        self._cache = target.new_cache(num_rows, shape.length)
        policy.start(num_rows, shape.length)
        self._anchors = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._starts = torch.zeros_like(self._anchors)
        self._lanes = torch.arange(num_rows, device=device)
        self._slots = torch.arange(size, device=device)
        self._tokens = torch.zeros(num_rows, CHUNK_CYCLES, size + 1, dtype=torch.int64, device=device)
        """How many drafts were accepted, then the tokens: [R, C, 1 + B]."""
        self._verdicts = torch.zeros(num_rows, CHUNK_CYCLES, size, device=device)
        """How many drafts were verified, and what was told of them, where blocks are cut: [R, C, 1 + (B-1)]."""
        self._uniforms = torch.zeros(num_rows, CHUNK_CYCLES, 2 * size - 1, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # number of the next cycle in the chunk
        self.tree_nodes = 0
        self._run = self._captured() if device.type == "cuda" else self._cycle

    @property
    def num_rows(self) -> int:
        """R."""
        return self.shape.num_rows

    def fits(self, shape: _Shape, sampling: Sampling | None) -> bool:
        """Whether they can answer prompts that want so many rows of so many positions, in blocks of this size."""
        mine = self.shape
        same = replace(mine, length=shape.length) == shape and self.sampling == sampling
        return same and shape.length <= mine.length <= 2 * shape.length

    def put(self, places: Sequence[int], rows: Sequence[Row], ready: Ready, sources: Sequence[int]) -> None:
        """See ``FixedRows``."""
        device = self._anchors.device
        index, source, anchors, starts = to_device(
            [places, sources, [row.anchor for row in rows], [row.start for row in rows]], device
        )
        self._cache.put(index, ready.cache, source)
        features = [self._spread(taps.index_select(0, source), index) for taps in ready.features]
        positions = torch.arange(ready.width, device=device)
        lengths = torch.zeros_like(self._starts).index_copy_(0, index, starts)
        # The last prompt token is before the anchor: a row's context are the positions below its start.
        self._policy.extend(features, positions.expand(len(lengths), -1), positions < lengths[:, None])
        self._anchors.index_copy_(0, index, anchors)
        self._starts.index_copy_(0, index, starts)

    def launch(self, num_cycles: int, uniforms: Sequence[Sequence[float]] | None) -> None:
        """Queue cycles; ``uniforms`` [R, C * (2B - 1)] where tokens are sampled."""
        self._place.zero_()
        if uniforms is not None:
            sent = to_device(uniforms, self._anchors.device, torch.float32)
            self._uniforms.copy_(sent.view_as(self._uniforms))
        for _ in range(num_cycles):
            self._run()

    def read(self, num_cycles: int) -> list[list[tuple[list[int], list[float] | None]]]:
        """Tokens of the queued cycles, [R, num_cycles], each with the verdict where blocks are cut; waits for them."""
        tokens = self._tokens[:, :num_cycles].tolist()  # the one look of a chunk
        cut = self.shape.threshold is not None
        verdicts = self._verdicts[:, :num_cycles].tolist() if cut else [[None] * num_cycles] * self.num_rows
        return [list(zip(*both, strict=True)) for both in zip(tokens, verdicts, strict=True)]

    def _cycle(self) -> None:
        """One block per row. Changes nothing but the contents of tensors, and launches the same work every time."""
        block = self._sampled_block()
        self._cache.expect(self.shape.length)
        found = self._chain(block) if self.shape.trees is None else self._tree(block, self.shape.trees)
        self._policy.extend(found.features, found.positions, self._slots <= found.num_accepted[:, None])
        tokens = torch.cat([found.num_accepted[:, None], found.tokens], dim=1)
        self._tokens.index_copy_(1, self._place, tokens[:, None])
        self._anchors.copy_(found.tokens.gather(1, found.num_accepted[:, None])[:, 0])
        # A row whose answer has ended goes on to the end of its room, and stays there.
        self._starts.add_(found.num_accepted + 1).clamp_(max=self.shape.length - self.shape.span)
        self._place.add_(1)

    def _chain(self, block: SampledBlock | None) -> Verified:
        """Draft one continuation per row, and verify it."""
        positions = self._starts[:, None] + self._slots  # [R, B]
        choose = best_tokens if block is None else block.choose
        drafts, limits = self._draft(choose)
        input_ids = torch.cat([self._anchors[:, None], drafts], dim=1)
        logits, features = self.target.decode_step(input_ids, positions, self._cache)
        if block is not None:
            num_accepted, tokens = block.judge(drafts, logits, self._lanes, limits)
        else:
            tokens = best_tokens(logits)
            num_accepted = accepted_drafts(drafts, tokens, limits)  # [R]
        return Verified(num_accepted, tokens, features, positions)

    def _draft(self, choose: Choose) -> tuple[Tensor, Tensor | None]:
        """Drafts [R, B-1], and how many of them are verified [R], where blocks are cut."""
        if self.shape.threshold is None:
            return self._policy.draft(self._anchors, self._starts, self._call(choose)), None
        confidence = Confidence(choose, self.shape.threshold)
        call = replace(self._call(confidence.choose), tell=confidence.tell)
        drafts, verdict = self._policy.draft(self._anchors, self._starts, call), confidence.verdict()
        self._verdicts.index_copy_(1, self._place, verdict[:, None])
        return drafts, verdict[:, 0].long()

    def _tree(self, block: SampledBlock | None, shape: TreeShape) -> Verified:
        """Draft a tree per row, and verify it."""
        assert isinstance(self._policy, TreePolicy)
        next_logits = self._policy.branch(self._anchors, self._starts, self._call(best_tokens))
        tree = draft_tree(self._anchors, next_logits, shape)
        self.tree_nodes = tree.tokens.shape[1] - 1  # the same in every cycle
        choose = best_tokens if block is None else lambda logits: block.answer(logits, tree.depths, self._lanes)
        return verify_tree(self.target, self._cache, tree, self._starts, choose)

    def _call(self, choose: Choose) -> DraftCall:
        return DraftCall(self.shape.block_size, choose, self.shape.length)

    def _sampled_block(self) -> SampledBlock | None:
        if self.sampling is None:
            return None
        return SampledBlock(self.sampling, self._uniforms.index_select(1, self._place)[:, 0])

    def _captured(self) -> Callable[[], object]:
        """The cycle as a CUDA graph; as it is, with a warning, where a model does what no graph can hold."""
        from helixctl.models.captured import GraphPool

        self._cycle()  # makes the cache's buffers
        self._place.zero_()  # a capture calls it a few times more, and fewer than there is room for
        try:
            return GraphPool(self.target.device).capture(self._cycle).replay
        except RuntimeError as error:
            _log.warning("the decoding cycle cannot be captured, decoding is slower: %s", str(error).splitlines()[0])
            return self._cycle
        finally:
            for state in (self._place, self._anchors, self._starts):
                state.zero_()

    def _spread(self, values: Tensor, index: Tensor) -> Tensor:
        """Rows [n, ...] at ``index`` [n] of a zero tensor [R, ...]."""
        return values.new_zeros(self.shape.num_rows, *values.shape[1:]).index_copy_(0, index, values)


class _Work(SteadyWork):
    """One set of prompts on its way through the rows."""

    def __init__(self, rows: _Rows, waiting: Sequence[Row], options: DecodeOptions) -> None:
        super().__init__(rows, waiting, options, CHUNK_CYCLES)
        self._fixed = rows

    def _take(self, row: Row, found: list[tuple[list[int], list[float] | None]]) -> None:
        for (num_accepted, *tokens), verdict in found:
            num_kept = min(num_accepted, row.room - 1)  # a last block is no longer than what may be emitted
            row.tree_nodes = self._fixed.tree_nodes
            worth, told = (
                (self._fixed.shape.block_size - 1, None) if verdict is None else (int(verdict[0]), verdict[1:])
            )
            row.emit(tokens[: num_kept + 1], (), self._options.stop_ids, worth, told)
            if row.finish is not None:
                break

    def _num_uniforms(self) -> int:
        return CHUNK_CYCLES * (2 * self._fixed.shape.block_size - 1)
