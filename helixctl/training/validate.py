"""``helixctl validate``: held-out metrics, real speculative decoding, losslessness, proofs on the user's own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from helixctl.data import sequence as order
from helixctl.data.fingerprint import check_tokenizer, load_fast_tokenizer
from helixctl.data.store import Store
from helixctl.decoding.calibration import calibrations
from helixctl.decoding.decoded import Decoded, DecodeOptions, DecodeProgress, accept_len
from helixctl.decoding.distribution import check_samples
from helixctl.decoding.fastest import FastestDecoder
from helixctl.decoding.losslessness import compare_greedy, measure_noise
from helixctl.decoding.speculative import decode_speculative
from helixctl.decoding.timing import time_decode
from helixctl.decoding.tree import cycle_span
from helixctl.errors import DataError, UsageError
from helixctl.models.target import Target
from helixctl.plan import Plan
from helixctl.training.build import load_exact_target, load_target, make_loader, make_slot_for
from helixctl.training.conversations import (
    Choice,
    Conversation,
    Turn,
    held_out_conversations,
    play,
    read_conversations,
)
from helixctl.training.evaluate import validation_metrics
from helixctl.training.live import ShuffledFeatures, decode_options, held_out_prompts, make_policy
from helixctl.training.loop import Drafter, autocast
from helixctl.training.process import set_up_process
from helixctl.training.proofs import EXACT, MAX_TOKENS, prove
from helixctl.training.restore import Trained, load_trained
from helixctl.training.results import GreedyCheck, Settings, Speed, ValidationResult
from helixctl.training.run_dir import choose_checkpoint
from helixctl.training.scores import prompt_results, source_results, total_result
from helixctl.training.stages import fill_slot

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how far it has come, and how much there is."""
Ids = tuple[int, ...]
Document = tuple[list[int], list[bool]]
"""Ids and loss mask."""

SPEED_PROMPTS = 3
SPEED_NEW_TOKENS = 64
"""What the speed is measured on, one prompt after the other."""
NOISE_ANSWERS = 8
"""Answers on which rounding is measured, those that differ first: each also alone, so few."""


@dataclass(frozen=True)
class ValidationRequest:
    """What `helixctl validate` was asked for, beside the recipe."""

    checkpoint: Path | None = None
    """A checkpoint of the run, or a published drafter; None takes the best of the run, else its newest."""
    bench: tuple[Path, ...] = ()
    """JSONL files of prompts; none decodes held-out ones."""
    choice: Choice = field(default_factory=Choice)
    """Which of their prompts, and how many turns."""
    max_new_tokens: int | None = None
    """Longest answer; None takes the recipe's."""
    block_size: int | None = None
    """Tokens per block when decoding; None takes the drafter's own, which is the most."""
    confidence_threshold: float | None = None
    """Verify only drafts that the drafter expects to be accepted, with all before them, with this probability; 0
    verifies all and measures what it expects; None does not ask."""
    tree_budget: int | None = None
    """Verify a tree of so many drafts per cycle, the anchor not counted; None verifies one continuation."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    """Of samples."""
    acceptance_only: bool = False
    """Decode with the drafter and nothing else: no held-out rows, no comparison, no speed, no proofs."""


@dataclass(frozen=True)
class Compared:
    """Speculative answers beside plain ones in one precision."""

    check: GreedyCheck
    identical: tuple[bool, ...]
    """Of every prompt."""


class Validator:
    """One drafter and what is measured on it."""

    def __init__(self, plan: Plan, trained: Trained, on_progress: Progress) -> None:
        self.plan = plan
        self.on_progress = on_progress
        self.device = torch.device(plan.target_devices[0])
        """Of target and drafter: nothing here is split over devices."""
        self.model, self.step = trained.model, trained.step
        self._decoder: FastestDecoder | None = None

    def held_out(self, target: Target, store: Store) -> dict[str, float]:
        """The metrics of the run's own validation pass."""
        plan, sums = self.plan, dict[str, Tensor]()
        sequence = order.Sequence(plan.batches_per_step, 1, 1, plan.validation_batches)
        loader = make_loader(plan, store, sequence)
        slot = make_slot_for(plan, self.device)
        first = sequence.seq_after_step(0)
        drafter = cast(Drafter, self.model)
        for seq in range(first, sequence.total):
            batch = loader.batch(seq)
            fill_slot(slot, batch, target.features(batch, last_hidden=plan.last_hidden))
            with torch.no_grad(), autocast(plan, self.device):
                for name, value in drafter.evaluate(slot, target.shared).items():
                    sums[name] = sums[name] + value if name in sums else value.clone()
            self.on_progress("held-out rows", seq - first + 1, sequence.total - first)
        return validation_metrics(sums) if sums else {}

    def speculate(self, target: Target, prompts: Sequence[Ids], options: DecodeOptions) -> list[Decoded]:
        """Answer every prompt with the drafter."""
        progress = self._count(f"speculative decoding, {target.precision}")
        return self._decoder_of(target).drafted(prompts, options, progress)

    def compare(
        self, target: Target, prompts: Sequence[Ids], options: DecodeOptions, drafted: Sequence[Decoded] | None = None
    ) -> Compared:
        """Answer every prompt plainly, and speculatively unless that was done (``drafted``), and compare.

        Margins and rounding are measured where answers differ: they cost a pass of their own.
        """
        drafted = self.speculate(target, prompts, options) if drafted is None else drafted
        decoder, progress = self._decoder_of(target), self._count(f"plain decoding, {target.precision}")
        answers = decoder.plain(prompts, options, progress)
        noise = None
        if any(one.tokens != other.tokens for one, other in zip(answers, drafted, strict=True)):
            answers = decoder.plain(prompts, replace(options, record_margins=True))
            # As many tokens as a forward verifies: products of other sizes round in other ways.
            num_tokens = cycle_span(options, options.block_size or self.plan.recipe.drafter.block_size)
            parted = [difference.prompt for difference in compare_greedy(answers, drafted, 0.0).differences]
            judged = [*parted, *(place for place in range(len(prompts)) if place not in parted)][:NOISE_ANSWERS]
            noise = measure_noise(target, [answers[place] for place in judged], num_tokens)
        found = compare_greedy(answers, drafted, noise or 0.0)
        check = GreedyCheck(target.precision, len(prompts), found.identical, found.near_ties, found.different, noise)
        differing = {difference.prompt for difference in found.differences}
        return Compared(check, tuple(index not in differing for index in range(len(prompts))))

    def speeds(self, target: Target, prompts: Sequence[Ids], options: DecodeOptions) -> tuple[Speed, ...]:
        """A few prompts one after the other, then a batch of them together.

        One row at a time is where a drafter helps most: there, a forward costs the reading of the weights, whatever the
        number of tokens.
        """
        short = replace(options, max_new_tokens=min(options.max_new_tokens, SPEED_NEW_TOKENS))
        together = min(options.batch_size, len(prompts))
        wanted = {1: prompts[:SPEED_PROMPTS], together: prompts[:together]}
        return tuple(self._speed(target, own, replace(short, batch_size=size)) for size, own in wanted.items())

    def _speed(self, target: Target, prompts: Sequence[Ids], options: DecodeOptions) -> Speed:
        decoder, device, size = self._decoder_of(target), target.device, options.batch_size
        ways = {f"speed without the drafter, {size} at a time": decoder.plain}
        ways[f"speed with the drafter, {size} at a time"] = decoder.drafted
        plain, drafted = (
            time_decode(device, decode, prompts, options, on_progress=self._count(what)).tokens_per_s
            for what, decode in ways.items()
        )
        return Speed(size, plain, drafted)

    def shuffled(self, target: Target, prompts: Sequence[Ids], options: DecodeOptions) -> float | None:
        """Acceptance length when the drafter is fed with features of the wrong places."""
        policy = ShuffledFeatures(make_policy(self.plan, self.model, target.shared), self.plan.recipe.run.seed)
        progress = self._count("control with shuffled features")
        answers = decode_speculative(target, policy, prompts, options, on_progress=progress)
        return accept_len(answers)

    def _decoder_of(self, target: Target) -> FastestDecoder:
        """One at a time: what another target's holds on its device is let go of."""
        if self._decoder is None or self._decoder.target is not target:
            self._decoder = FastestDecoder(target, make_policy(self.plan, self.model, target.shared))
        return self._decoder

    def _count(self, what: str) -> Callable[[DecodeProgress], None]:
        return lambda progress: self.on_progress(what, progress.num_done, progress.num_prompts)


def run_validation(
    plan: Plan,
    request: ValidationRequest | None = None,
    *,
    on_progress: Progress = lambda what, done, total: None,
) -> ValidationResult:
    """Validate a checkpoint: the one given, else the best of the run, else its newest.

    Losslessness is judged in float32 (float64 with float8 products); the target's own precision is reported beside it
    with its near-ties. With a temperature the answers are tested for the target's distribution instead.

    Raises:
        CheckpointError: there is no whole checkpoint, or it belongs to another recipe.
        DataError: no store, one made with another tokenizer, or prompts that cannot be read.
        UsageError: prompts for a target that cannot be decoded, or a block size that the drafter does not have.
    """
    request = request or ValidationRequest()
    _check(request, plan)
    store = Store.open(plan.recipe.data.store)
    path = choose_checkpoint(plan.recipe.run.dir, request.checkpoint)
    tokenizer = load_fast_tokenizer(plan.recipe.target)
    check_tokenizer(store, tokenizer)
    options = _options(plan, tokenizer, request)
    asked = _conversations(plan, store, tokenizer, request)
    set_up_process(plan)
    trained = load_trained(plan, path, torch.device(plan.target_devices[0]))
    validator = Validator(plan, trained, on_progress)
    target = load_target(plan, plan.target_devices[0])
    result = _result(path, trained.step)
    if not request.acceptance_only:
        result = replace(result, held_out=validator.held_out(target, store))
    document = proof_document(store)
    if not asked:
        return replace(result, proofs=prove(plan, validator.model, _exact(plan, target), document, None))
    turns, left_out = play(asked, tokenizer, lambda ids: validator.speculate(target, ids, options), options.max_len)
    if not turns:
        raise DataError(f"none of the {left_out} prompts leaves room for an answer", fix="give shorter ones")
    result = replace(result, settings=_settings(plan, options, request), turns_left_out=left_out)
    if request.acceptance_only:
        return _scored(result, asked, turns, None, tokenizer)
    return _judged(result, validator, (target, document), (asked, turns, tokenizer), options)


def _judged(
    result: ValidationResult,
    validator: Validator,
    subject: tuple[Target, Document],
    played: tuple[Sequence[Conversation], Sequence[Turn], Any],
    options: DecodeOptions,
) -> ValidationResult:
    """Control, speed, losslessness and proofs, on the prompts that were played."""
    (target, document), (asked, turns, tokenizer) = subject, played
    prompts = [turn.prompt.ids for turn in turns]
    drafted = [turn.decoded for turn in turns]
    control = validator.shuffled(target, prompts, options)
    speeds = validator.speeds(target, prompts, options)
    result = replace(
        result,
        accept_len_shuffled=control,
        plain_tokens_per_s=speeds[0].plain_tokens_per_s,
        speculative_tokens_per_s=speeds[0].speculative_tokens_per_s,
        speeds=speeds,
    )
    exact = _exact(validator.plan, target)
    if options.sampling is not None:
        samples = check_samples(target, drafted, options.sampling, seed=options.seed)
        proofs = prove(validator.plan, validator.model, exact, document, None)
        return _scored(replace(result, samples=samples, proofs=proofs), asked, turns, None, tokenizer)
    served = validator.compare(target, prompts, options, drafted)
    judged = served if exact is target else validator.compare(exact, prompts, options)
    checks = (judged.check,) if exact is target else (judged.check, served.check)
    proofs = prove(validator.plan, validator.model, exact, document, judged.check)
    return _scored(replace(result, greedy=checks, proofs=proofs), asked, turns, judged.identical, tokenizer)


def _scored(
    result: ValidationResult,
    asked: Sequence[Conversation],
    turns: Sequence[Turn],
    identical: Sequence[bool] | None,
    tokenizer: Any,
) -> ValidationResult:
    total = total_result(turns, identical)
    return replace(
        result,
        accept_len=total.accept_len,
        prompts=prompt_results(asked, turns, identical, tokenizer),
        sources=source_results(asked, turns, identical),
        total=total,
        confidence=calibrations(turn.decoded for turn in turns),
    )


def _check(request: ValidationRequest, plan: Plan) -> None:
    """Refuse what cannot work before anything is loaded."""
    own = plan.recipe.drafter.block_size
    if request.block_size is not None and not 2 <= request.block_size <= own:
        raise UsageError(
            f"--block-size {request.block_size} is not between 2 and the drafter's own, {own}",
            fix="the anchor counts: 2 drafts one token",
        )
    if request.confidence_threshold is not None and not plan.recipe.drafter.tells_confidence:
        algorithm = plan.recipe.drafter.algorithm
        raise UsageError(
            f"--confidence-threshold: this {algorithm} drafter does not learn how sure it is of its drafts",
            fix="leave it out; --block-size drafts less",
        )
    if request.tree_budget is not None and request.confidence_threshold is not None:
        raise UsageError(
            "--tree-budget and --confidence-threshold both say what is verified", fix="leave one of the two out"
        )
    if request.tree_budget is not None and plan.target.recurrent:
        raise UsageError(
            f"--tree-budget: {plan.target.model_type} targets cannot be decoded yet, with trees or without",
            fix="leave it out",
        )
    if request.temperature == 0 and (request.top_k is not None or request.top_p < 1):
        raise UsageError(
            "--top-k and --top-p cut what is sampled; greedy decoding samples nothing", fix="set --temperature"
        )
    if request.bench and plan.target.recurrent:
        raise UsageError(f"{plan.target.model_type} targets cannot be decoded yet", fix="leave --bench out")


def _options(plan: Plan, tokenizer: Any, request: ValidationRequest) -> DecodeOptions:
    options = decode_options(plan, tokenizer)
    return replace(
        options,
        max_new_tokens=request.max_new_tokens or options.max_new_tokens,
        block_size=request.block_size,
        confidence_threshold=request.confidence_threshold,
        tree_budget=request.tree_budget,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
    )


def _settings(plan: Plan, options: DecodeOptions, request: ValidationRequest) -> Settings:
    return Settings(
        block_size=options.block_size or plan.recipe.drafter.block_size,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        batch_size=options.batch_size,
        skip=request.choice.skip,
        limit=request.choice.limit,
        confidence_threshold=options.confidence_threshold,
        tree_budget=options.tree_budget,
    )


def _conversations(plan: Plan, store: Store, tokenizer: Any, request: ValidationRequest) -> list[Conversation]:
    """What is decoded: the files' prompts, else held-out ones; none where the target cannot be decoded."""
    if request.bench:
        return read_conversations(request.bench, tokenizer, request.choice)
    skip, limit = request.choice.skip, request.choice.limit
    wanted = plan.recipe.validation.live_prompts if limit is None else limit
    count = 0 if plan.target.recurrent else skip + wanted
    return held_out_conversations(held_out_prompts(store, tokenizer, count, plan.target.max_positions or None)[skip:])


def _exact(plan: Plan, target: Target) -> Target:
    """The target in the precision in which decoding must be lossless token for token."""
    return target if target.precision in EXACT else load_exact_target(plan, plan.target_devices[0])


def proof_document(store: Store) -> Document:
    """Ids and mask of a held-out (else a training) document, cut at MAX_TOKENS or what its first anchor needs.

    The one with the most supervised tokens among those that begin early enough, else the one that begins first.
    """
    split = store.split("validation")
    if not split.num_documents:
        split = store.split("train")
    usable = split.trainable(MAX_TOKENS // 2)
    first = int(split.first_anchors.argmin())
    chosen = int(usable[split.supervised_counts[usable].argmax()]) if usable.size else first
    end = max(MAX_TOKENS, int(split.first_anchors[chosen]) + MAX_TOKENS // 2)
    return split.tokens(chosen)[:end].tolist(), split.loss_mask(chosen)[:end].tolist()


def _result(path: Path, step: int) -> ValidationResult:
    return ValidationResult(
        checkpoint=str(path),
        step=step,
        held_out={},
        accept_len=None,
        accept_len_shuffled=None,
        prompts=(),
        greedy=(),
        plain_tokens_per_s=None,
        speculative_tokens_per_s=None,
        proofs=(),
    )
