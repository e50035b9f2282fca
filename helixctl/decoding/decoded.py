"""Options of a decode, and what comes out of it. Nothing here runs a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from helixctl.decoding.sampling import Sampling

Finish = Literal["stop", "length"]
Kind = Literal["prefill", "draft", "bonus"]


@dataclass(frozen=True)
class DecodeOptions:
    """How prompts are answered."""

    max_new_tokens: int
    """Longest answer, in tokens; a stop token counts."""
    stop_ids: frozenset[int] = frozenset()
    """An answer ends with the first of these; it is kept as the last token."""
    block_size: int | None = None
    """Tokens verified at once, the anchor included; at most the drafter's own, which is what None means."""
    batch_size: int = 32
    """Rows decoded together; further prompts wait and take the place of finished ones."""
    max_len: int | None = None
    """The target's position limit: most tokens of prompt and answer together. Reaching it is finish `length`."""
    temperature: float = 0.0
    """0 is greedy; else tokens are sampled, drafts too, and the target's distribution stays."""
    top_k: int | None = None
    """Sample from so many best tokens only."""
    top_p: float = 1.0
    """Sample from the best tokens that weigh so much together only."""
    seed: int = 0
    """With a prompt's ids, seeds its samples: but for rounding they do not depend on the other prompts. The same prompt
    several times gets several samples."""
    tree_budget: int | None = None
    """Verify a tree of so many drafts per cycle, the anchor not counted; None verifies one continuation."""
    confidence_threshold: float | None = None
    """Verify only drafts that the drafter thinks are accepted, with all before them, with at least this probability; 0
    verifies all and records what it thought (`Decoded.confidences`). None does not ask it."""
    record_margins: bool = False
    """Keep the gap of the two best logits of every token (plain greedy decoding; needed by compare_greedy)."""

    @property
    def sampling(self) -> Sampling | None:
        """What is sampled from; None where decoding is greedy."""
        return Sampling(self.temperature, self.top_k, self.top_p) if self.temperature > 0 else None


@dataclass(frozen=True)
class Decoded:
    """The answer to one prompt."""

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    """Emitted tokens; a stop token is the last of them."""
    accepted: tuple[int, ...]
    """Tokens emitted by each verify cycle, bonus included. The first token comes from the prefill and is in none. A
    last cycle cut by a stop token or by the length limit counts what it emitted: sum(accepted) == len(tokens) - 1."""
    finish: Finish
    judged: tuple[int, ...] = ()
    """Drafts of each cycle whose fate is known: all that were verified, but for those behind a cut. Which of them were
    accepted follows from `accepted` and `last_is_bonus`: see `acceptance_by_position`. With trees: positions of the
    block, whether the tree came so far or not."""
    last_is_bonus: bool = True
    """Whether the last cycle got as far as its bonus token; false when it was cut inside the accepted drafts."""
    confidences: tuple[tuple[float, ...], ...] = ()
    """What the drafter told of every judged draft, by cycle: the probability that it is accepted if those before it
    are. Empty unless `DecodeOptions.confidence_threshold` is given."""
    margins: tuple[float, ...] = ()
    """Gap between the two best logits, per token; empty unless asked for."""
    tree_nodes: int = 0
    """Drafts that every cycle verified as a tree, the anchor not counted; 0 where drafts were a chain."""

    @property
    def num_verified(self) -> int:
        """Drafts that were verified in all cycles; of a chain those whose fate is known."""
        return self.tree_nodes * len(self.accepted) or sum(self.judged)

    @property
    def accept_len(self) -> float | None:
        """Mean tokens emitted per verify cycle; None without any cycle."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else None

    @property
    def segments(self) -> tuple[tuple[int, Kind], ...]:
        """Every token with where it came from, for colouring; plain decoding has only `prefill` and `bonus`."""
        kinds: list[Kind] = ["prefill"]
        for cycle, emitted in enumerate(self.accepted):
            whole = self.last_is_bonus or cycle < len(self.accepted) - 1
            kinds.extend("draft" for _ in range(emitted - whole))
            kinds.extend("bonus" for _ in range(whole))
        return tuple(zip(self.tokens, kinds, strict=True))


@dataclass(frozen=True)
class DecodeProgress:
    """How far a decode has come."""

    num_done: int
    """Prompts answered."""
    num_prompts: int
    num_tokens: int
    """Tokens emitted so far, by all prompts."""


def accept_len(decoded: Iterable[Decoded]) -> float | None:
    """Mean tokens emitted per verify cycle, over all cycles of all prompts (long answers weigh more); None without any.

    Engines (vLLM, SGLang) count this way; the mean of the prompts' own `accept_len` is what the papers' scripts print.
    """
    cycles = [emitted for one in decoded for emitted in one.accepted]
    return sum(cycles) / len(cycles) if cycles else None


def clip(tokens: Sequence[int], room: int, stop_ids: frozenset[int]) -> tuple[list[int], Finish | None]:
    """What is emitted of a cycle's `tokens`: up to the first stop id, at most `room`; and why it ends, if so."""
    kept: list[int] = []
    for token in tokens[:room]:
        kept.append(token)
        if token in stop_ids:
            return kept, "stop"
    return kept, "length" if len(kept) == room else None
