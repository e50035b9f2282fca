"""A target whose next token is a function of the whole prefix, and drafters that are right, wrong, or anything between.

The fake cache stores tokens by position, and an unwritten position is an error: a stale, missing or misplaced write
changes the output or fails.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import torch

HOLE = -1


class FakeCache:
    def __init__(self, num_rows, max_len):
        self.ids = torch.full((num_rows, max_len), HOLE, dtype=torch.int64)

    def select(self, rows):
        self.ids = self.ids[rows]

    def put(self, rows, other, taken=None):
        self.ids[rows, : other.ids.shape[1]] = other.ids if taken is None else other.ids[taken]

    def move(self, sources, places):
        self.ids.scatter_(1, places, self.ids.gather(1, sources))

    def expect(self, length):
        assert length <= self.ids.shape[1]
        self.expected = length


class FakeTarget:
    """Features of a token: [position, id, next token], so that a fake drafter can check what it is given."""

    device = torch.device("cpu")

    def __init__(self, vocab_size=11, salt=0, script=None):
        self.vocab_size = vocab_size
        self.salt = salt
        self.script = script
        self.calls = []

    def next_token(self, prefix):
        if self.script is not None:
            return self.script(prefix)
        return zlib.crc32(repr((self.salt, *prefix)).encode()) % self.vocab_size

    def answer(self, prompt, num_tokens, stop_ids=frozenset()):
        """The slow, obvious reference."""
        tokens: list[int] = []
        while len(tokens) < num_tokens and not (tokens and tokens[-1] in stop_ids):
            tokens.append(self.next_token([*prompt, *tokens]))
        return tokens

    def new_cache(self, num_rows, max_len):
        return FakeCache(num_rows, max_len)

    def decode_step(self, input_ids, positions, cache, logits_at=None, branches=None):
        assert input_ids.shape == positions.shape and input_ids.shape[0] == cache.ids.shape[0]
        self.calls.append(tuple(input_ids.shape))
        places = positions if branches is None else branches.places
        assert getattr(cache, "expected", None) in (None, int(places.max()) + 1)
        cache.ids.scatter_(1, places, input_ids)
        next_ids = torch.zeros_like(input_ids)
        for r, row in enumerate(positions.tolist()):
            for t, position in enumerate(row):
                prefix = cache.ids[r, : position + 1].tolist()
                if branches is not None:
                    start, own = int(places[r, 0]), places[r, branches.ancestors[r, t]]
                    prefix = [*cache.ids[r, :start].tolist(), *cache.ids[r, own].tolist()]
                assert HOLE not in prefix and len(prefix) == position + 1
                next_ids[r, t] = self.next_token(prefix)
        logits = torch.nn.functional.one_hot(next_ids, self.vocab_size).float()
        features = torch.stack([positions, input_ids, next_ids], dim=-1).float()
        if logits_at is not None:
            logits = logits[torch.arange(len(logits)), logits_at].unsqueeze(1)
        return logits, [features, features + 1]


class SteadyFake(FakeTarget):
    """For the decoder of fixed shapes: steps say where a row ends, not where its tokens do."""

    def decode_step(self, input_ids, positions, cache, logits_at=None, branches=None):
        places = positions if branches is None else branches.places
        assert int(places.max()) < cache.expected <= cache.ids.shape[1]
        cache.expected = None
        return super().decode_step(input_ids, positions, cache, logits_at, branches)


class FakePolicy:
    """Knows the target; is right about the j-th drafted token when `right(row_rng, j)` says so.

    Its context is what it was given: a missing or wrong token makes a perfect drafter wrong, or is an error.
    """

    def __init__(self, target, block_size, right, wrong=None):
        self.target = target
        self.block_size = block_size
        self.right = right
        self.wrong = wrong
        self.rng = random.Random(0)
        self.num_drafts = 0

    def start(self, num_rows, max_len):
        self.context = torch.full((num_rows, max_len), HOLE, dtype=torch.int64)
        self.filled = [0] * num_rows

    def extend(self, features, positions, valid):
        assert len(features) == 2 and valid.dtype == torch.bool
        assert positions.shape[0] == len(self.filled)
        for r in range(len(valid)):
            keep = valid[r]
            assert torch.equal(features[0][r, keep, 0].long(), positions[r, keep])
            assert torch.equal(features[1][r, keep], features[0][r, keep] + 1)
            self.context[r, positions[r, keep]] = features[0][r, keep, 1].long()
            if keep.any():
                self.filled[r] = int(positions[r, keep].max()) + 1

    def draft(self, anchor_ids, positions, call):
        assert anchor_ids.shape == positions.shape == (len(self.filled),)
        assert call.size <= self.block_size and call.length >= int(positions.max())
        self.num_drafts += 1
        drafts = [self._row(r, *a) for r, a in enumerate(zip(anchor_ids.tolist(), positions.tolist(), strict=True))]
        logits = torch.nn.functional.one_hot(torch.tensor(drafts), self.target.vocab_size).float()
        return call.choose(logits[:, : call.size - 1])

    def _row(self, r, token, position):
        prefix = [*self.context[r, :position].tolist(), token]
        assert HOLE not in prefix
        drafts: list[int] = []
        for j in range(self.block_size - 1):
            best = self.target.next_token([*prefix, *drafts])
            other = (best + 1) % self.target.vocab_size if self.wrong is None else self.wrong
            drafts.append(best if self.right(self.rng, j) else other)
        return drafts


class TellingPolicy(FakePolicy):
    """Tells something of every draft that hangs on the row's prefix alone."""

    def draft(self, anchor_ids, positions, call):
        if call.tell is not None:
            rows = enumerate(zip(anchor_ids.tolist(), positions.tolist(), strict=True))
            told = [self.sure([*self.context[r, :position].tolist(), token]) for r, (token, position) in rows]
            call.tell(torch.tensor(told)[:, : call.size - 1])
        return super().draft(anchor_ids, positions, call)

    def sure(self, prefix):
        """Shares that are 1 now and then, and 0."""
        numbers = random.Random(repr(prefix))
        return [round(min(1.0, 1.2 * numbers.random()), 1) for _ in range(self.block_size - 1)]


class FakeTreePolicy(FakePolicy):
    """Puts `weight` on what it would draft, and small random weights on the rest."""

    def __init__(self, *of_chains, weight=1.0):
        super().__init__(*of_chains)
        self.weight = weight
        self.generator = torch.Generator().manual_seed(0)

    def branch(self, anchor_ids, positions, call):
        chosen: list[torch.Tensor] = []
        self.draft(anchor_ids, positions, replace(call, choose=chosen.append))
        logits = chosen[0] * self.weight + torch.rand(chosen[0].shape, generator=self.generator)
        return lambda slot, tokens: logits[:, slot, None]


class ChainTarget:
    """Really random: the next token's logits hang on the last two tokens. Many rows cost little."""

    device = torch.device("cpu")

    def __init__(self, vocab_size=4, seed=0):
        self.vocab_size = vocab_size
        self.table = torch.randn(vocab_size, vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2

    def new_cache(self, num_rows, max_len):
        return FakeCache(num_rows, max_len)

    def decode_step(self, input_ids, positions, cache, logits_at=None, branches=None):
        cache.ids.scatter_(1, positions if branches is None else branches.places, input_ids)
        before = cache.ids.gather(1, (positions - 1).clamp(min=0))
        if branches is not None:  # the nearest ancestor is the last of them
            index = torch.arange(input_ids.shape[1])
            parents = (branches.ancestors.long() * index).masked_fill(index == index[:, None], 0).amax(-1)
            before = torch.cat([before[:, :1], input_ids.gather(1, parents)[:, 1:]], dim=1)
        assert (before != HOLE).all()
        logits = self.table[before, input_ids]
        if logits_at is not None:
            logits = logits[torch.arange(len(logits)), logits_at].unsqueeze(1)
        return logits, []

    def sequence_probabilities(self, prompt, num_tokens, shares):
        """Every answer of so many tokens with its probability, by enumeration; `shares` turns logits into them."""
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(num_tokens):
            longer: dict[tuple[int, ...], float] = {}
            for answer, weight in found.items():
                one, two = [*prompt, *answer][-2:]
                for token, share in enumerate(shares(self.table[one, two]).tolist()):
                    longer[(*answer, token)] = weight * share
            found = longer
        return found


class SteadyChain(ChainTarget):
    """For the decoder of fixed shapes: rows that are not in use have nothing before them."""

    def decode_step(self, input_ids, positions, cache, logits_at=None, branches=None):
        cache.ids.clamp_(min=0)
        return super().decode_step(input_ids, positions, cache, logits_at, branches)


class ChainPolicy:
    """Drafts from a table of its own: all slots at once, or one after the other, each given the one before."""

    def __init__(self, vocab_size=4, block_size=4, seed=1, one_by_one=False):
        self.block_size = block_size
        self.table = torch.randn(block_size - 1, vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))
        self.one_by_one = one_by_one
        self.sure = torch.rand(block_size - 1, vocab_size, generator=torch.Generator().manual_seed(seed))

    def start(self, num_rows, max_len):
        pass

    def extend(self, features, positions, valid):
        pass

    def draft(self, anchor_ids, positions, call):
        if not self.one_by_one:
            return call.choose(self.table[: call.size - 1, anchor_ids].transpose(0, 1))
        drafts = [anchor_ids]
        for slot in range(call.size - 1):
            if call.tell is not None:
                call.tell(self.sure[slot, drafts[-1]][:, None])
            drafts.append(call.choose(self.table[slot, drafts[-1]][:, None])[:, 0])
        return torch.stack(drafts[1:], dim=1)

    def branch(self, anchor_ids, positions, call):
        if not self.one_by_one:
            return lambda slot, tokens: self.table[slot, anchor_ids][:, None]
        return lambda slot, tokens: self.table[slot, tokens]


def perfect(rng, j):
    return True


def hopeless(rng, j):
    return False


def sometimes(share):
    return lambda rng, j: rng.random() < share
