"""The batch of rows that is being decoded: prefill, draft, verify, accept, give a row to the next prompt, shrink.

One cycle serves plain and speculative decoding: without a drafter a block is the anchor alone. Rolling back needs no
work, because positions are overwritten and a query sees no position above its own; for the same reason rows that are
finished may stay in the batch and decode garbage until they are replaced or dropped.

Legend: R rows of the target's cache, L lanes (rows of the drafter), T tokens per row, B block_size, K taps, H target
width, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from helixctl.decoding.confidence import Confidence
from helixctl.decoding.decoded import Decoded, DecodeOptions, Finish, clip
from helixctl.decoding.greedy import accepted_drafts, best_tokens, margins
from helixctl.decoding.policy import Choose, DecodeTarget, DraftCall, DraftPolicy, TreePolicy
from helixctl.decoding.sampling import SampledBlock, sample_tokens
from helixctl.decoding.tree import TreeShape, cycle_span, draft_tree, tree_policy, tree_shape, verify_tree

PREFILL_TOKENS = 16384
"""Tokens per prefill call, padding included: bounds the activations of a batch of long prompts."""


@dataclass
class Row:
    """One prompt on its way."""

    index: int
    """Place among the prompts of the call."""
    prompt: tuple[int, ...]
    limit: int
    """Most tokens that are emitted."""
    generator: random.Random
    lane: int = -1
    """Row of the drafter; keeps its number when the target's rows move."""
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    confidences: list[tuple[float, ...]] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    last_is_bonus: bool = True
    tree_nodes: int = 0
    finish: Finish | None = None
    taken: bool = False
    """The finished answer was handed out."""

    @property
    def anchor(self) -> int:
        """The last known token, not yet seen by the target."""
        return self.tokens[-1]

    @property
    def start(self) -> int:
        """Position of the anchor."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - len(self.tokens)

    def emit(
        self,
        tokens: Sequence[int],
        gaps: Sequence[float],
        stop_ids: frozenset[int],
        num_drafts: int,
        told: Sequence[float] | None = None,
    ) -> None:
        """Take a cycle's tokens (the last is the bonus) as far as they count.

        ``num_drafts`` were verified; ``told``: how sure the drafter was of them, where it was asked.
        """
        room = self.room
        kept, self.finish = clip(tokens, room, stop_ids)
        if self.tokens:
            self.accepted.append(len(kept))
            self.last_is_bonus = len(kept) == len(tokens)
            self.judged.append(min(num_drafts, room - 1) if self.last_is_bonus else len(kept))
            if told is not None:
                self.confidences.append(tuple(told[: self.judged[-1]]))
        self.tokens += kept
        self.margins += gaps[: len(kept)]

    def decoded(self) -> Decoded:
        """The finished answer."""
        assert self.finish is not None
        return Decoded(
            prompt_ids=self.prompt,
            tokens=tuple(self.tokens),
            accepted=tuple(self.accepted),
            judged=tuple(self.judged),
            finish=self.finish,
            last_is_bonus=self.last_is_bonus,
            confidences=tuple(self.confidences),
            margins=tuple(self.margins),
            tree_nodes=self.tree_nodes,
        )


@dataclass(frozen=True, eq=False)
class _Drafts:
    """What a cycle verifies of what was drafted."""

    ids: Tensor  # [R, T-1] int64
    counts: Sequence[int]
    """Of each row, how many are verified: T-1 or fewer."""
    limits: Tensor | None = None
    """The same on the device, [R] int64; None where all rows have T-1."""
    told: Sequence[Sequence[float]] | None = None
    """How sure the drafter was of every draft of a row; None where it was not asked."""


class RowBatch:
    """Rows decoded together. `prefill` all rows first, then `cycle`, replacing or dropping finished rows in between.

    Args:
        target: the model; its cache is made here, for `num_rows` rows.
        policy: the drafter, or None for plain decoding.
        block_size: B; 1 without a drafter.
        num_rows: R and L.
        max_len: positions that the prompts and answers need; the block's overhang is added here.
        options: stop ids, temperature, margins.
    """

    def __init__(
        self,
        target: DecodeTarget,
        policy: DraftPolicy | None,
        options: DecodeOptions,
        *,
        block_size: int,
        num_rows: int,
        max_len: int,
    ) -> None:
        self._target = target
        self._policy = policy
        self._options = options
        self._block_size = block_size
        self._max_len = max_len + cycle_span(options, block_size)
        self._tree_policy = None if policy is None else tree_policy(options, policy)
        self._tree_shape = tree_shape(options, block_size)
        self._cache = target.new_cache(num_rows, self._max_len)
        if policy is not None:
            policy.start(num_rows, self._max_len)
        self._lanes: list[Row] = []
        self._num_rows = num_rows
        self.rows: list[Row] = []

    @property
    def idle(self) -> list[int]:
        """Cache rows whose prompt is finished."""
        return [i for i, row in enumerate(self.rows) if row.finish is not None]

    @property
    def num_active(self) -> int:
        """Rows that still decode."""
        return sum(row.finish is None for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens emitted by the rows that still decode."""
        return sum(len(row.tokens) for row in self.rows if row.finish is None)

    def finished(self) -> list[Row]:
        """Rows that finished since the last call."""
        new = [row for row in self.rows if row.finish is not None and not row.taken]
        for row in new:
            row.taken = True
        return new

    @torch.no_grad()
    def fill(self, rows: Sequence[Row]) -> None:
        """Prefill the batch's first prompts, one per row, and emit their first tokens."""
        assert not self.rows and len(rows) == self._num_rows
        for lane, row in enumerate(rows):
            row.lane = lane
        self._lanes, self.rows = list(rows), list(rows)
        self._prefill(range(len(rows)))

    @torch.no_grad()
    def replace(self, rows: Sequence[Row]) -> None:
        """Prefill prompts into idle rows and emit their first tokens."""
        places = self.idle[: len(rows)]
        for place, row in zip(places, rows, strict=True):
            row.lane = self.rows[place].lane
            self._lanes[row.lane] = self.rows[place] = row
        self._prefill(places)

    @torch.no_grad()
    def shrink(self) -> None:
        """Drop the finished rows."""
        places = [i for i, row in enumerate(self.rows) if row.finish is None]
        self._cache.select(self._tensor(places))
        self.rows = [self.rows[i] for i in places]

    @torch.no_grad()
    def cycle(self) -> None:
        """Draft a block in every row, verify all in one forward of the target, emit what was accepted and the bonus."""
        if self._tree_policy is not None and self._tree_shape is not None:
            self._tree_cycle(self._tree_policy, self._tree_shape)
            return
        rows = self.rows
        starts = self._tensor([row.start for row in rows])
        lanes = self._tensor([row.lane for row in rows])
        block = self._sampled_block()
        drafts = self._drafts(block, lanes)
        width = drafts.ids.shape[1] + 1
        positions = starts[:, None] + torch.arange(width, device=starts.device)  # [R, T]
        input_ids = torch.cat([self._tensor([row.anchor for row in rows])[:, None], drafts.ids], dim=1)  # [R, T]
        self._cache.expect(max(row.start for row in rows) + width)
        logits, features = self._target.decode_step(input_ids, positions, self._cache)
        gaps: list[list[float]] | None = None
        if block is not None:
            num_accepted, choices = block.judge(drafts.ids, logits, lanes, drafts.limits)
        else:
            choices, gaps = self._best(logits)
            num_accepted = accepted_drafts(drafts.ids, choices, drafts.limits)  # [R]
        if self._policy is not None:
            valid = torch.arange(width, device=starts.device) <= num_accepted[:, None]  # the anchor and accepted drafts
            self._extend(features, positions, valid, rows)
        host = torch.cat(
            [num_accepted[:, None], choices], dim=1
        ).tolist()  # the cycle's one sync, unless blocks are cut: tokens decide what is next
        for i, (row, (accepted, *tokens)) in enumerate(zip(rows, host, strict=True)):
            if row.finish is None:
                kept = min(accepted, row.room - 1)  # a row's last block is no longer than what it may emit
                told = drafts.told[i] if drafts.told is not None else None
                gap = gaps[i] if gaps else ()
                row.emit(tokens[: kept + 1], gap, self._options.stop_ids, drafts.counts[i], told)

    def _tree_cycle(self, policy: TreePolicy, shape: TreeShape) -> None:
        """As `cycle`, with a tree of drafts per row. Trees keep their shape near an answer's end."""
        rows, block = self.rows, self._sampled_block()
        lanes = self._tensor([row.lane for row in rows])
        places = [lane.start for lane in self._lanes]
        anchors, starts = self._tensor([lane.anchor for lane in self._lanes]), self._tensor(places)  # [L]
        next_logits = policy.branch(anchors, starts, DraftCall(shape.block_size, best_tokens, max(places)))
        tree = draft_tree(anchors, next_logits, shape).take(lanes)
        self._cache.expect(max(row.start for row in rows) + tree.tokens.shape[1])
        choose = best_tokens if block is None else lambda logits: block.answer(logits, tree.depths, lanes)
        verified = verify_tree(self._target, self._cache, tree, starts[lanes], choose)
        valid = torch.arange(shape.block_size, device=lanes.device) <= verified.num_accepted[:, None]
        self._extend(verified.features, verified.positions, valid, rows)
        host = torch.cat([verified.num_accepted[:, None], verified.tokens], dim=1).tolist()  # the cycle's one sync
        for row, (accepted, *tokens) in zip(rows, host, strict=True):
            if row.finish is None:
                kept, row.tree_nodes = min(accepted, row.room - 1), tree.tokens.shape[1] - 1
                row.emit(tokens[: kept + 1], (), self._options.stop_ids, shape.block_size - 1)

    def _drafts(self, block: SampledBlock | None, lanes: Tensor) -> _Drafts:
        """Draft in all lanes: whole blocks, or what of each row's is worth verifying."""
        width = min(self._block_size, max(row.room for row in self.rows if row.finish is None))
        asked = self._policy is not None and self._options.confidence_threshold is not None
        if width == 1:
            nothing: list[list[float]] = [[] for _ in self.rows]
            return _Drafts(lanes.new_empty(len(lanes), 0), [0] * len(lanes), told=nothing if asked else None)
        choose = best_tokens if block is None else block.choose
        if asked:
            return self._confident_drafts(choose, lanes)
        return _Drafts(self._draft(choose)[lanes, : width - 1], [width - 1] * len(lanes))

    def _confident_drafts(self, choose: Choose, lanes: Tensor) -> _Drafts:
        """Cut every row's block where its drafter expects too little of it, and where its answer ends.

        Rows are verified together: the forward is as wide as the longest block, and a row's places behind its own cut
        are not judged, so that no row's answer hangs on the others'.
        """
        threshold = self._options.confidence_threshold
        assert threshold is not None
        confidence = Confidence(choose, threshold)
        ids = self._draft(confidence.choose, confidence.tell)
        verdict = confidence.verdict()[lanes].tolist()  # a sync of its own: how wide the forward is hangs on it
        counts = [
            0 if row.finish is not None else min(int(worth), row.room - 1)
            for row, (worth, *_) in zip(self.rows, verdict, strict=True)
        ]
        return _Drafts(ids[lanes, : max(counts)], counts, self._tensor(counts), [told for _, *told in verdict])

    def _draft(self, choose: Choose, tell: Callable[[Tensor], None] | None = None) -> Tensor:
        """Proposals [L, B-1]; the drafter always works on all lanes."""
        assert self._policy is not None
        starts = [lane.start for lane in self._lanes]
        call = DraftCall(self._block_size, choose, max(starts), tell)
        return self._policy.draft(self._tensor([lane.anchor for lane in self._lanes]), self._tensor(starts), call)

    def _sampled_block(self) -> SampledBlock | None:
        """The next random numbers of the rows that decode; None where decoding is greedy."""
        sampling = self._options.sampling
        if sampling is None:
            return None
        count = 2 * self._block_size - 1
        numbers = [[row.generator.random() for _ in range(count)] for row in self._lanes]
        return SampledBlock(sampling, self._tensor(numbers, torch.float32))

    def _best(self, logits: Tensor) -> tuple[Tensor, list[list[float]] | None]:
        """The best tokens [R, T] of logits [R, T, V], and their margins if asked for."""
        choices = best_tokens(logits)
        return choices, margins(logits, choices).tolist() if self._options.record_margins else None

    def _first(self, logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, list[list[float]] | None]:
        """An answer's first token per row [R, 1], from logits [R, 1, V]."""
        sampling = self._options.sampling
        if sampling is None:
            return self._best(logits)
        return sample_tokens(logits[:, -1], sampling, [row.generator for row in rows])[:, None], None

    def _prefill(self, places: Sequence[int]) -> None:
        for group in _groups(places, self.rows):
            self._prefill_group(group)

    def _prefill_group(self, places: list[int]) -> None:
        """One forward over some rows' prompts, padded on the right; the padding's positions are overwritten later."""
        rows = [self.rows[i] for i in places]
        lengths = self._tensor([len(row.prompt) for row in rows])
        width = max(len(row.prompt) for row in rows)
        input_ids = self._tensor([row.prompt + row.prompt[-1:] * (width - len(row.prompt)) for row in rows])
        positions = torch.arange(width, device=input_ids.device).expand(len(rows), width)
        whole = len(places) == len(self.rows)
        cache = self._cache if whole else self._target.new_cache(len(rows), width)
        cache.expect(width)
        logits, features = self._target.decode_step(input_ids, positions, cache, logits_at=lengths - 1)
        if not whole:
            self._cache.put(self._tensor(places), cache)
        if self._policy is not None:
            self._extend(features, positions, positions < lengths[:, None], rows)
        choices, gaps = self._first(logits, rows)
        for i, (row, tokens) in enumerate(zip(rows, choices.tolist(), strict=True)):  # a sync per prefill
            row.emit(tokens, gaps[i] if gaps else (), self._options.stop_ids, 0)

    def _extend(self, features: Sequence[Tensor], positions: Tensor, valid: Tensor, rows: Sequence[Row]) -> None:
        """Give the drafter the features of some rows; the other lanes get none."""
        assert self._policy is not None
        lanes = [row.lane for row in rows]
        if lanes == list(range(len(self._lanes))):
            self._policy.extend(features, positions, valid)
            return
        index = self._tensor(lanes)
        spread = [_spread(x, index, len(self._lanes)) for x in (*features, positions, valid)]
        self._policy.extend(spread[:-2], spread[-2], spread[-1])

    def _tensor(self, numbers: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype = torch.int64) -> Tensor:
        """Host numbers on the target's device. From pinned memory, since a copy from any other waits for the device."""
        device = self._target.device
        return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _groups(places: Sequence[int], rows: Sequence[Row]) -> Iterator[list[int]]:
    """Split rows into prefill calls of at most PREFILL_TOKENS padded tokens, similar lengths together."""
    group: list[int] = []
    width = 0
    for place in sorted(places, key=lambda i: -len(rows[i].prompt)):
        width = max(width, len(rows[place].prompt))
        if group and width * (len(group) + 1) > PREFILL_TOKENS:
            yield group
            group, width = [], len(rows[place].prompt)
        group.append(place)
    if group:
        yield group


def _spread(values: Tensor, index: Tensor, num_lanes: int) -> Tensor:
    """Rows [n, ...] at `index` [n] of a zero tensor [L, ...]."""
    return values.new_zeros(num_lanes, *values.shape[1:]).index_copy_(0, index, values)
