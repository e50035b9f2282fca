"""``helixctl validate``: held-out metrics, real speculative decoding, losslessness, proofs on the user's own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from helixctl.data import sequence as order
from helixctl.data.fingerprint import check_tokenizer, load_fast_tokenizer
from helixctl.data.store import Store
from helixctl.decoding.decoded import Decoded, DecodeOptions, DecodeProgress, accept_len
from helixctl.decoding.losslessness import compare_greedy, measure_noise
from helixctl.decoding.speculative import decode_plain, decode_speculative
from helixctl.decoding.timing import time_plain, time_speculative
from helixctl.errors import UsageError
from helixctl.models.target import Target
from helixctl.plan import Plan
from helixctl.training.build import load_target, make_loader, make_slot_for
from helixctl.training.drafter import Drafter, autocast
from helixctl.training.evaluate import validation_metrics
from helixctl.training.live import (
    Prompt,
    ShuffledFeatures,
    decode_options,
    held_out_prompts,
    make_policy,
    prompts_from_file,
)
from helixctl.training.process import set_up_process
from helixctl.training.proofs import MAX_TOKENS, prove
from helixctl.training.restore import Trained, load_trained
from helixctl.training.results import GreedyCheck, PromptResult, Segment, ValidationResult
from helixctl.training.run_dir import choose_checkpoint
from helixctl.training.stages import fill_slot

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how far it has come, and how much there is."""

_MAX_CHARACTER_TOKENS = 4
"""UTF-8 has no longer ones."""
SPEED_PROMPTS = 3
SPEED_NEW_TOKENS = 64
"""What the speed is measured on, one prompt after the other."""
NOISE_ANSWERS = 4
"""Answers on which rounding is measured: one after the other, a token at a time, so few."""


@dataclass(frozen=True)
class Both:
    """The same prompts answered with and without the drafter in one precision."""

    speculative: list[Decoded]
    check: GreedyCheck
    identical: frozenset[int]
    """Indices of the prompts whose answers are equal."""


class Validator:
    """One drafter and what is measured on it."""

    def __init__(self, plan: Plan, trained: Trained, on_progress: Progress) -> None:
        self.plan = plan
        self.on_progress = on_progress
        self.device = torch.device(plan.target_devices[0])
        """Of target and drafter: nothing here is split over devices."""
        self.model, self.step = trained.model, trained.step

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

    def decode(self, target: Target, prompts: Sequence[Prompt], options: DecodeOptions) -> Both:
        """Answer every prompt plainly and speculatively, and compare.

        Margins and rounding are measured where answers differ: they cost a pass of their own.
        """
        ids = [prompt.ids for prompt in prompts]
        policy = make_policy(self.plan, self.model, target.shared)
        name = str(target.dtype).removeprefix("torch.")
        answers = decode_plain(target, ids, options, on_progress=self._count(f"plain decoding, {name}"))
        progress = self._count(f"speculative decoding, {name}")
        drafted = decode_speculative(target, policy, ids, options, on_progress=progress)
        noise = None
        if any(one.tokens != other.tokens for one, other in zip(answers, drafted, strict=True)):
            answers = decode_plain(target, ids, replace(options, record_margins=True))
            noise = measure_noise(target, answers[:NOISE_ANSWERS], policy.block_size)
        found = compare_greedy(answers, drafted, noise or 0.0)
        check = GreedyCheck(name, len(ids), found.identical, found.near_ties, found.different, noise)
        parted = {difference.prompt for difference in found.differences}
        return Both(drafted, check, frozenset(range(len(ids))) - parted)

    def speed(self, target: Target, prompts: Sequence[Prompt], options: DecodeOptions) -> tuple[float, float]:
        """Tokens per second without and with the drafter, a few prompts one after the other.

        One row at a time is where a drafter helps: there, a forward costs the reading of the weights, whatever the
        number of tokens.
        """
        ids = [prompt.ids for prompt in prompts[:SPEED_PROMPTS]]
        alone = replace(options, batch_size=1, max_new_tokens=min(options.max_new_tokens, SPEED_NEW_TOKENS))
        policy = make_policy(self.plan, self.model, target.shared)
        plain = time_plain(target, ids, alone, on_progress=self._count("speed without the drafter"))
        drafted = time_speculative(target, policy, ids, alone, on_progress=self._count("speed with the drafter"))
        return plain.tokens_per_s, drafted.tokens_per_s

    def shuffled(self, target: Target, prompts: Sequence[Prompt], options: DecodeOptions) -> float | None:
        """Acceptance length when the drafter is fed with features of the wrong places."""
        policy = ShuffledFeatures(make_policy(self.plan, self.model, target.shared), self.plan.recipe.run.seed)
        progress = self._count("control with shuffled features")
        answers = decode_speculative(target, policy, [p.ids for p in prompts], options, on_progress=progress)
        return accept_len(answers)

    def _count(self, what: str) -> Callable[[DecodeProgress], None]:
        return lambda progress: self.on_progress(what, progress.num_done, progress.num_prompts)


def run_validation(
    plan: Plan,
    *,
    checkpoint: Path | None = None,
    prompts: Path | None = None,
    on_progress: Progress = lambda what, done, total: None,
) -> ValidationResult:
    """Validate a checkpoint: the one given, else the best of the run, else its newest.

    Losslessness is judged in float32; the target's own precision is reported beside it with its near-ties.

    Raises:
        CheckpointError: there is no whole checkpoint, or it belongs to another recipe.
        DataError: no store, one made with another tokenizer, or prompts that cannot be read.
        UsageError: prompts for a target that cannot be decoded.
    """
    store = Store.open(plan.recipe.data.store)
    path = choose_checkpoint(plan.recipe.run.dir, checkpoint)
    tokenizer = load_fast_tokenizer(plan.recipe.target)
    check_tokenizer(store, tokenizer)
    options = decode_options(plan, tokenizer)
    asked = _prompts(plan, store, tokenizer, prompts, options.max_len)
    set_up_process(plan)
    trained = load_trained(plan, path, torch.device(plan.target_devices[0]))
    validator = Validator(plan, trained, on_progress)
    target = load_target(plan, plan.target_devices[0])
    held_out = validator.held_out(target, store)
    document = proof_document(store)
    if not asked:
        return _result(path, validator, held_out, prove(plan, validator.model, _exact(plan, target), document, None))
    served = validator.decode(target, asked, options)
    control = validator.shuffled(target, asked, options)
    plain_speed, drafted_speed = validator.speed(target, asked, options)
    exact = _exact(plan, target)
    judged = served if exact is target else validator.decode(exact, asked, options)
    proofs = prove(plan, validator.model, exact, document, judged.check)
    checks = (judged.check,) if exact is target else (judged.check, served.check)
    return replace(
        _result(path, validator, held_out, proofs),
        accept_len=accept_len(served.speculative),
        accept_len_shuffled=control,
        prompts=tuple(_prompt_results(tokenizer, asked, served, judged.identical)),
        greedy=checks,
        plain_tokens_per_s=plain_speed,
        speculative_tokens_per_s=drafted_speed,
    )


def _prompts(plan: Plan, store: Store, tokenizer: Any, file: Path | None, max_len: int | None) -> list[Prompt]:
    """What is decoded: the prompts of ``file``, else held-out ones; none where the target cannot be decoded."""
    if file is None:
        limit = 0 if plan.target.recurrent else plan.recipe.validation.live_prompts
        return held_out_prompts(store, tokenizer, limit, max_len)
    if plan.target.recurrent:
        raise UsageError(f"{plan.target.model_type} targets cannot be decoded yet", fix="leave --prompts out")
    return prompts_from_file(file, tokenizer)


def _exact(plan: Plan, target: Target) -> Target:
    """The target in float32, in which decoding must be lossless token for token."""
    return target if target.dtype == torch.float32 else load_target(plan, plan.target_devices[0], "float32")


def proof_document(store: Store) -> tuple[list[int], list[bool]]:
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


def _result(path: Path, validator: Validator, held_out: dict[str, float], proofs: tuple[Any, ...]) -> ValidationResult:
    return ValidationResult(
        checkpoint=str(path),
        step=validator.step,
        held_out=held_out,
        accept_len=None,
        accept_len_shuffled=None,
        prompts=(),
        greedy=(),
        plain_tokens_per_s=None,
        speculative_tokens_per_s=None,
        proofs=proofs,
    )


def _prompt_results(
    tokenizer: Any, prompts: Sequence[Prompt], both: Both, identical: frozenset[int]
) -> list[PromptResult]:
    return [
        PromptResult(
            prompt=prompt.text,
            num_tokens=len(decoded.tokens),
            accept_len=decoded.accept_len or 1.0,
            identical=index in identical,
            segments=_segments(tokenizer, decoded),
        )
        for index, (prompt, decoded) in enumerate(zip(prompts, both.speculative, strict=True))
    ]


def _segments(tokenizer: Any, decoded: Decoded) -> tuple[Segment, ...]:
    """The answer's pieces; tokens that only together make a character are one piece, of the kind of the last."""
    segments: list[Segment] = []
    held: list[int] = []
    for token, kind in decoded.segments:
        held.append(token)
        text = tokenizer.decode(held)
        if not text.endswith("\ufffd") or len(held) == _MAX_CHARACTER_TOKENS:
            segments.append(Segment(text, kind))
            held = []
    return (*segments, Segment(tokenizer.decode(held), decoded.segments[-1][1])) if held else tuple(segments)
