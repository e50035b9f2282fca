"""`helixctl doctor --recipe R --live`: the proofs of `docs/architecture.md` on the real target and drafter.

The drafter is the run's best or newest checkpoint, or a fresh one. Without a store the proofs run on random tokens, so
they can be had before anything is prepared. What is proven stands in `training/proofs.py` and `models/proof.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from helixctl.checkpoint.store import list_checkpoints
from helixctl.data.fingerprint import check_tokenizer, load_fast_tokenizer
from helixctl.data.store import Store
from helixctl.doctor.probe import LIVE_IDS, Outcome, State
from helixctl.errors import HelixError
from helixctl.models.target import Target
from helixctl.plan import Plan
from helixctl.training.build import build_drafter, drafter_plugin, load_exact_target
from helixctl.training.live import Prompt, decode_options, held_out_prompts
from helixctl.training.process import set_up_process
from helixctl.training.proofs import prove
from helixctl.training.restore import Trained, load_trained
from helixctl.training.results import GreedyCheck, Proof
from helixctl.training.run_dir import choose_checkpoint
from helixctl.training.validate import Progress, Validator, proof_document

_GREEDY = 4
"""The last proof, which needs decoding."""
_RANDOM_TOKENS, _RANDOM_PROMPTS, _PROMPT_TOKENS = 96, 2, 16
_SUBJECT = (LIVE_IDS[0], "target and drafter")
_MEMORY_FIX = (
    "the proofs run in float32: use a device with 4 bytes for every weight of the target, or run them on the CPU"
)


@dataclass(frozen=True)
class Material:
    """What the proofs run on."""

    source: str
    document: tuple[list[int], list[bool]]
    """Ids and loss mask."""
    prompts: list[Prompt]
    tokenizer: Any


def prove_live(
    plan: Plan, *, checkpoint: Path | None = None, on_progress: Progress = lambda what, done, total: None
) -> Iterator[Outcome]:
    """What the proofs ran on, then one outcome per proof with the number that was measured.

    ``checkpoint``: instead of the run's own. Loading fails as an outcome, not as an exception.
    """
    started_at = perf_counter()
    try:
        set_up_process(plan)
        material = _material(plan)
        target = load_exact_target(plan, plan.target_devices[0])
        told, drafter = _drafter(plan, checkpoint, target)
        yield _outcome(_SUBJECT, "ok", f"{told}, on {material.source}", started_at)
        started_at = perf_counter()
        check = _decode(plan, drafter, target, material, on_progress)
        found = prove(plan, drafter.model, target, material.document, check)
    except HelixError as error:
        yield replace(_outcome(_SUBJECT, "fail", error.message, started_at), remedy=error.fix)
        return
    except torch.OutOfMemoryError as error:
        text = str(error).splitlines()[0]
        yield replace(_outcome(_SUBJECT, "fail", text, started_at), remedy=_MEMORY_FIX)
        return
    yield from _outcomes(plan, found, started_at)


def _outcomes(plan: Plan, found: tuple[Proof, ...], started_at: float) -> Iterator[Outcome]:
    for number, proof in enumerate(found, 1):
        state: State = "ok" if proof.passed else "fail"
        outcome = _outcome((LIVE_IDS[number], proof.name), state, proof.detail, started_at)
        yield outcome if proof.passed else replace(outcome, remedy="report it with this recipe and target: a bug")
        started_at = perf_counter()
    if len(found) < _GREEDY:
        why = "this target cannot be decoded yet" if plan.target.recurrent else "validation.live_prompts is 0"
        yield _outcome((LIVE_IDS[_GREEDY], "speculative output equals plain greedy output"), "skip", why, started_at)


def _outcome(who: tuple[str, str], state: State, message: str, started_at: float) -> Outcome:
    return Outcome(*who, state, message, None, perf_counter() - started_at)


def _drafter(plan: Plan, checkpoint: Path | None, target: Target) -> tuple[str, Trained]:
    """A checkpoint's drafter, or a fresh one where the run has none; and which it is."""
    root = plan.recipe.run.dir / "checkpoints"
    if checkpoint is not None or (root.exists() and list_checkpoints(root)):
        path = choose_checkpoint(plan.recipe.run.dir, checkpoint)
        return f"checkpoint {path.name}", load_trained(plan, path, target.device)
    model = build_drafter(plan, target.device)
    plugin: Any = drafter_plugin(plan)
    plugin.initialise(model, target.layers, target.shared)
    return "a fresh drafter", Trained(model, 0)


def _material(plan: Plan) -> Material:
    """A document and prompts of the store, else random ones."""
    tokenizer = load_fast_tokenizer(plan.recipe.target)
    if plan.recipe.data.store.exists():
        store = Store.open(plan.recipe.data.store)
        check_tokenizer(store, tokenizer)
        limit = 0 if plan.target.recurrent else plan.recipe.validation.live_prompts
        prompts = held_out_prompts(store, tokenizer, limit, plan.target.max_positions or None)
        return Material("held-out documents", proof_document(store), prompts or _random_prompts(plan), tokenizer)
    ids = _random_ids(plan, _RANDOM_TOKENS, 0)
    mask = [i >= _PROMPT_TOKENS for i in range(len(ids))]
    return Material("random tokens: there is no store yet", (ids, mask), _random_prompts(plan), tokenizer)


def _random_prompts(plan: Plan) -> list[Prompt]:
    if plan.target.recurrent or not plan.recipe.validation.live_prompts:
        return []
    ids = (_random_ids(plan, _PROMPT_TOKENS, seed) for seed in range(1, _RANDOM_PROMPTS + 1))
    return [Prompt("random tokens", tuple(drawn)) for drawn in ids]


def _random_ids(plan: Plan, count: int, seed: int) -> list[int]:
    facts = plan.target
    special = {*facts.bos_token_ids, *facts.eos_token_ids, *facts.pad_token_ids, plan.recipe.drafter.mask_token_id}
    draw = random.Random(seed)
    count = min(count, facts.max_positions or count, plan.recipe.data.seq_len)
    drawn = (draw.randrange(facts.vocab_size) for _ in range(16 * count))
    return [i for i in drawn if i not in special][:count]


def _decode(
    plan: Plan, drafter: Trained, target: Target, material: Material, on_progress: Progress
) -> GreedyCheck | None:
    """The prompts answered with and without the drafter; None where there is nothing to decode."""
    if not material.prompts:
        return None
    options = decode_options(plan, material.tokenizer)
    short = replace(options, max_new_tokens=min(options.max_new_tokens, plan.recipe.validation.live_new_tokens))
    prompts = [prompt.ids for prompt in material.prompts]
    return Validator(plan, drafter, on_progress).compare(target, prompts, short).check
