"""Answers prompts with a target alone, or with a drafter whose blocks the target verifies.

Both run the same loop (`rows.py`) over prompts of different lengths: at most `batch_size` rows at a time, waiting
prompts take the rows of finished ones, and when none waits the batch shrinks. Greedy speculative decoding gives what
plain greedy decoding gives, token for token up to rounding (`losslessness.py`); with a temperature it draws from the
distribution that plain sampling draws from (`sampling.py`, `distribution.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from random import Random

from helixctl.decoding.decoded import Decoded, DecodeOptions, DecodeProgress
from helixctl.decoding.policy import DecodeTarget, DraftPolicy
from helixctl.decoding.rows import Row, RowBatch
from helixctl.errors import UsageError

__all__ = ["DecodeOptions", "DecodeProgress", "Decoded", "decode_plain", "decode_speculative", "stream_plain"]

OnProgress = Callable[[DecodeProgress], None]
Prompts = Sequence[Sequence[int]]

REFILL_SHARE = 8
"""Waiting prompts are prefilled when one row in so many is idle: a prefill of one costs about as much as a cycle."""
SHRINK_SHARE = 4
"""With none waiting the batch shrinks when one row in so many is idle; it copies the cache."""


def decode_plain(
    target: DecodeTarget, prompts: Prompts, options: DecodeOptions, *, on_progress: OnProgress | None = None
) -> list[Decoded]:
    """Answer `prompts` (token ids) without a drafter, greedily or by sampling; every cycle emits one token.

    Returns:
        One `Decoded` per prompt, in order.

    Raises:
        UsageError: an empty prompt, or one that leaves no room for an answer.
    """
    return _in_order(stream_plain(target, prompts, options, on_progress=on_progress))


def stream_plain(
    target: DecodeTarget, prompts: Prompts, options: DecodeOptions, *, on_progress: OnProgress | None = None
) -> Iterator[tuple[int, Decoded]]:
    """As `decode_plain`, but yield (index, answer) as soon as an answer is finished, in any order."""
    return _run(target, None, prompts, options, 1, on_progress)


def decode_speculative(
    target: DecodeTarget,
    policy: DraftPolicy,
    prompts: Prompts,
    options: DecodeOptions,
    *,
    on_progress: OnProgress | None = None,
) -> list[Decoded]:
    """Answer `prompts` with blocks that `policy` drafts and `target` verifies, greedily or by sampling.

    The last blocks are no longer than what may still be emitted.

    Returns:
        One `Decoded` per prompt, in order.

    Raises:
        UsageError: as `decode_plain`; a block larger than the drafter's, or of one token.
    """
    block_size = check_block_size(options, policy)
    return _in_order(_run(target, policy, prompts, options, block_size, on_progress))


def check_block_size(options: DecodeOptions, policy: DraftPolicy) -> int:
    """Tokens per block that ``options`` ask for.

    Raises:
        UsageError: more than the drafter has, or too few to draft.
    """
    block_size = options.block_size or policy.block_size
    if not 2 <= block_size <= policy.block_size:
        raise UsageError(
            f"block size {block_size} is not between 2 and the drafter's own",
            fix=f"use {policy.block_size} or less; the anchor counts, so 2 drafts one token",
        )
    return block_size


def _in_order(answers: Iterator[tuple[int, Decoded]]) -> list[Decoded]:
    return [decoded for _, decoded in sorted(answers, key=lambda pair: pair[0])]


def _run(
    target: DecodeTarget,
    policy: DraftPolicy | None,
    prompts: Prompts,
    options: DecodeOptions,
    block_size: int,
    on_progress: OnProgress | None,
) -> Iterator[tuple[int, Decoded]]:
    """The loop: fill, then cycle; yields answers as they finish."""
    waiting = deque(make_rows(prompts, options))
    if not waiting:
        return
    num_rows = min(options.batch_size, len(waiting))
    max_len = max(len(row.prompt) + row.limit for row in waiting)
    batch = RowBatch(target, policy, options, block_size=block_size, num_rows=num_rows, max_len=max_len)
    batch.fill([waiting.popleft() for _ in range(num_rows)])
    done: dict[int, Decoded] = {}
    while True:
        for row in batch.finished():
            done[row.index] = row.decoded()
            yield row.index, done[row.index]
        if on_progress is not None:
            tokens = sum(len(d.tokens) for d in done.values()) + batch.num_tokens
            on_progress(DecodeProgress(num_done=len(done), num_prompts=len(prompts), num_tokens=tokens))
        if not waiting and not batch.num_active:
            return
        if not _refilled(batch, waiting):
            batch.cycle()


def _refilled(batch: RowBatch, waiting: deque[Row]) -> bool:
    """Give idle rows to waiting prompts, or drop them, once there are enough; true if prompts were prefilled."""
    num_idle, num_rows = len(batch.idle), len(batch.rows)
    if waiting and (num_idle * REFILL_SHARE >= num_rows or num_idle >= len(waiting)):
        batch.replace([waiting.popleft() for _ in range(min(num_idle, len(waiting)))])
        return True
    if not waiting and num_idle * SHRINK_SHARE >= num_rows:
        batch.shrink()
    return False


def make_rows(prompts: Prompts, options: DecodeOptions) -> list[Row]:
    """Rows for all prompts, the longest prompt first so that neighbours are of like length."""
    rows = []
    seen: Counter[tuple[int, ...]] = Counter()
    for index, prompt in enumerate(prompts):
        room = options.max_new_tokens if options.max_len is None else options.max_len - len(prompt)
        if not len(prompt):
            raise UsageError(f"prompt {index} is empty", fix="give it at least one token")
        if room < 1:
            raise UsageError(
                f"prompt {index} has {len(prompt)} tokens; the target's limit is {options.max_len}, answer included",
                fix="shorten it",
            )
        ids = tuple(int(token) for token in prompt)
        again = f":{seen[ids]}" if seen[ids] else ""
        rows.append(Row(index, ids, min(room, options.max_new_tokens), Random(f"{options.seed}:{ids}{again}")))
        seen[ids] += 1
    return sorted(rows, key=lambda row: -len(row.prompt))
