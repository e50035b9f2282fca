"""What the commands return: plain values, printed by ``cli/render.py`` and written as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helixctl.decoding.acceptance import PositionAcceptance
from helixctl.decoding.calibration import Calibrations
from helixctl.decoding.distribution import SampleCheck


@dataclass(frozen=True)
class TrainResult:
    """The end of a training run; also ``result.json`` in the run directory."""

    run_dir: str
    finished: bool
    """False when the user stopped it; ``train --resume`` goes on."""
    steps: int
    total_steps: int
    tokens_per_s: float
    train_seconds: float
    loss: float | None
    validation: dict[str, float]
    """Metrics of the last validation pass."""
    best_value: float | None
    best_step: int | None
    checkpoint: str | None
    peak_memory_bytes: dict[str, int]
    accounting: dict[str, int]
    """Documents and micro-batches: what was read, kept, dropped by reason, produced, trained, validated."""
    pipeline: dict[str, dict[str, float]]
    """Seconds waited on each side of every channel, and for slots, since the first micro-batch had come through;
    `start_wait_s`: until then."""
    reserved_memory_bytes: dict[str, int] = field(default_factory=dict)
    """Most that torch's allocator held on each GPU; what is above the peak was fragmented or idle."""
    predicted_memory_bytes: dict[str, int] = field(default_factory=dict)
    """What the plan said of the peak: `predicted / peak` of each device shows how well."""
    process_memory_bytes: dict[str, int] = field(default_factory=dict)
    """Of the prediction for main memory: Python and its libraries, before anything of the run is there."""
    compile_cache: str = ""
    """Hit or miss, the file, and what differs; empty where nothing is compiled."""
    compiled: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Seconds, graphs, graph breaks, recompilations and cache counters of every component that was compiled."""
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What `prepare` made of each source: documents read, kept, held out and dropped by reason; the documents, tokens
    and supervised tokens that it gives to an epoch, and its share of the tokens."""


@dataclass(frozen=True)
class Segment:
    """A piece of a decoded answer."""

    text: str
    kind: str
    """draft (proposed by the drafter and accepted), bonus (the target's own) or prefill."""


@dataclass(frozen=True)
class TurnResult:
    """Speculative decoding of one answer."""

    prompt: str
    """What the user said; what came before is in the earlier turns."""
    num_tokens: int
    accept_len: float | None
    """None where the first token was the whole answer."""
    identical: bool | None
    """With plain greedy decoding; None where nothing was compared."""
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class PromptResult:
    """Speculative decoding of one prompt: a conversation of one turn or several."""

    source: str
    id: str
    num_tokens: int
    num_cycles: int
    """Forwards of the target that verified a block."""
    accept_len: float | None
    """Mean emitted tokens per cycle, over the cycles of all turns; None without any."""
    turns: tuple[TurnResult, ...]


@dataclass(frozen=True)
class SourceResult:
    """One source of prompts."""

    source: str
    num_prompts: int
    num_turns: int
    num_tokens: int
    score: float | None
    """Mean over prompts of each prompt's accept_len: every prompt weighs the same."""
    accept_len: float | None
    """Over all cycles: long answers weigh more. Engines count this way."""
    identical: int | None
    """Turns equal to plain greedy decoding; None where nothing was compared."""
    positions: tuple[PositionAcceptance, ...]
    verified_per_cycle: float | None = None
    """Mean number of drafts per cycle that were verified, and whose fate is known; all nodes where they are trees. None
    without any cycle."""
    accepted_per_verified: float | None = None
    """Share of them that was accepted; None without any."""


@dataclass(frozen=True)
class Settings:
    """How the answers were decoded."""

    block_size: int
    """Tokens per block, the anchor included."""
    max_new_tokens: int
    temperature: float
    """0: greedy."""
    top_k: int | None
    top_p: float
    seed: int
    batch_size: int
    skip: int
    """Prompts left out at the beginning of every file."""
    limit: int | None
    """Most prompts of every file."""
    confidence_threshold: float | None = None
    """Blocks were cut where the drafter expected less; None: it was not asked."""
    tree_budget: int | None = None
    """Drafts were trees of so many nodes, the anchor not counted; None: chains."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second, over all rows, in the target's own precision; prefill included, warm-up not."""

    batch_size: int
    """Prompts decoded together."""
    plain_tokens_per_s: float
    speculative_tokens_per_s: float


@dataclass(frozen=True)
class GreedyCheck:
    """Speculative against plain greedy output in one precision."""

    dtype: str
    prompts: int
    identical: int
    near_ties: int
    """Prompts whose first difference stands where plain decoding's two best logits are closer than the noise."""
    different: int
    noise: float | None
    """Measured rounding of the gap between two logits; None where nothing differed, so nothing was measured."""


@dataclass(frozen=True)
class Proof:
    """One of the proofs of ``docs/architecture.md``, on the user's own model."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class ValidationResult:
    """What ``helixctl validate`` found."""

    checkpoint: str
    step: int
    held_out: dict[str, float]
    accept_len: float | None
    """Mean emitted tokens per verify cycle over all cycles of all prompts, bonus included."""
    accept_len_shuffled: float | None
    """The same drafter fed with features in shuffled order: what the features are worth is the difference."""
    prompts: tuple[PromptResult, ...]
    """All that were decoded, in order."""
    greedy: tuple[GreedyCheck, ...]
    plain_tokens_per_s: float | None
    """Decoding without the drafter, one prompt after the other, in the target's own precision."""
    speculative_tokens_per_s: float | None
    proofs: tuple[Proof, ...]
    settings: Settings | None = None
    """None where nothing was decoded."""
    sources: tuple[SourceResult, ...] = ()
    total: SourceResult | None = None
    """All sources together."""
    samples: SampleCheck | None = None
    """With a temperature: whether the answers are drawn from the target's distribution."""
    speeds: tuple[Speed, ...] = ()
    """One prompt at a time, then a batch."""
    confidence: Calibrations | None = None
    """What the drafter told of its drafts beside what became of them; None where it was not asked."""
    turns_left_out: int = 0
    """Turns whose history left no room for an answer."""

    @property
    def lossless(self) -> bool:
        """No answer differs, near-ties of low precision aside; samples have the target's distribution."""
        return all(check.different == 0 for check in self.greedy) and (self.samples is None or self.samples.holds)
