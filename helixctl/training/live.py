"""Held-out prompts as token ids, and the acceptance length of a drafter on them by real decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor, nn

from helixctl.data.store import Store
from helixctl.decoding.decoded import DecodeOptions, accept_len
from helixctl.decoding.policy import DraftCall, DraftPolicy, NextLogits, TreePolicy
from helixctl.decoding.speculative import decode_speculative
from helixctl.metrics import names
from helixctl.models.shared import SharedWeights
from helixctl.plan import Plan
from helixctl.training.build import Targets, drafter_plugin
from helixctl.training.wiring import Control

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError)
"""What chat templates raise on roles and contents that they do not expect; ValueError also where there is none."""
LIVE_PROMPTS = 8
"""Most prompts that are decoded during training."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the user wrote it, and as the target reads it."""

    text: str
    ids: tuple[int, ...]
    source: str = ""
    """Which set it belongs to, where that is known."""


def held_out_prompts(store: Store, tokenizer: Any, limit: int, max_len: int | None) -> list[Prompt]:
    """``limit`` prompts of the validation documents, rendered with the target's chat template.

    The first of every source, then the second of every source, and so on. Passed over: prompts that fill more than half
    of ``max_len``, the target's positions, or that the template refuses.
    """
    found: list[Prompt] = []
    for entry in _by_turns(store.prompts()):
        if len(found) == limit:
            break
        with suppress(*TEMPLATE_ERRORS):
            prompt = _tokenise(tokenizer, entry["text"]) if "text" in entry else render_prompt(tokenizer, entry)
            if prompt.ids and (max_len is None or len(prompt.ids) <= max_len // 2):
                found.append(replace(prompt, source=str(entry.get("source") or "")))
    return found


class LiveDecoder:
    """Decodes held-out prompts with the live target during training.

    Runs on the drafter's thread between two steps: nothing random is drawn, and the training stream is not touched.
    """

    def __init__(
        self, plan: Plan, targets: Targets, prompts: Sequence[Prompt], options: DecodeOptions, control: Control
    ) -> None:
        self._plan = plan
        self._progress = control.progress
        self._targets = targets
        self._prompts = prompts[:LIVE_PROMPTS]
        self._options = replace(options, max_new_tokens=plan.recipe.validation.live_new_tokens)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Mean emitted tokens per verify cycle over all prompts, under its name; 1 where none needed a cycle."""
        device = self._plan.target_devices[0]
        policy = make_policy(self._plan, model, self._targets.shared_on(device))
        with torch.no_grad():
            answers = decode_speculative(
                self._targets.on(device),
                policy,
                [prompt.ids for prompt in self._prompts],
                self._options,
                on_progress=lambda _: self._progress.beat("drafter-0"),
            )
        return {names.LIVE_ACCEPT_LEN: accept_len(answers) or 1.0}


class ShuffledFeatures:
    """A draft policy that is fed the right features at the wrong places: the control that shows what they are worth."""

    def __init__(self, policy: DraftPolicy, seed: int) -> None:
        self._policy = policy
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def block_size(self) -> int:
        """As the drafter's own."""
        return self._policy.block_size

    def start(self, num_rows: int, max_len: int) -> None:
        """As the drafter's own."""
        self._policy.start(num_rows, max_len)

    def extend(self, features: Sequence[Tensor], positions: Tensor, valid: Tensor) -> None:
        """Extend the context with the features of randomly chosen valid places of the same call."""
        width, rows = features[0].shape[-1], valid.nonzero().cpu()
        order = torch.randperm(len(rows), generator=self._generator)
        mixed = [f.clone() for f in features]
        for source, destination in zip(features, mixed, strict=True):
            flat = source[valid]
            destination[valid] = flat[order.to(flat.device)].view(-1, width)
        self._policy.extend(mixed, positions, valid)

    def draft(self, anchor_ids: Tensor, positions: Tensor, call: DraftCall) -> Tensor:
        """As the drafter's own."""
        return self._policy.draft(anchor_ids, positions, call)

    def branch(self, anchor_ids: Tensor, positions: Tensor, call: DraftCall) -> NextLogits:
        """As the drafter's own, if it drafts trees."""
        assert isinstance(self._policy, TreePolicy)
        return self._policy.branch(anchor_ids, positions, call)


def make_policy(plan: Plan, model: nn.Module, shared: SharedWeights) -> DraftPolicy:
    """The algorithm's own way to decode with this drafter."""
    plugin: Any = drafter_plugin(plan)
    policy: DraftPolicy = plugin.policy(model, shared)
    return policy


def decode_options(plan: Plan, tokenizer: Any) -> DecodeOptions:
    """Greedy decoding until one of the target's stop tokens."""
    validation = plan.recipe.validation
    return DecodeOptions(
        max_new_tokens=validation.max_new_tokens,
        stop_ids=frozenset(plan.target.eos_token_ids) | frozenset([tokenizer.eos_token_id]) - {None},
        batch_size=validation.batch_size,
        max_len=plan.target.max_positions or None,
    )


def render_prompt(tokenizer: Any, entry: Mapping[str, Any]) -> Prompt:
    """A conversation's ``messages`` (and ``tools``) as the target reads them; its last message is the text.

    Raises:
        One of TEMPLATE_ERRORS: the chat template refuses it.
    """
    messages = entry["messages"]
    text = tokenizer.apply_chat_template(
        messages, tools=entry.get("tools") or None, add_generation_prompt=True, tokenize=False
    )
    return replace(_tokenise(tokenizer, text), text=str(messages[-1].get("content") or ""))


def _by_turns(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries so that sources take turns; the order within a source stays."""
    seen: Counter[str] = Counter()
    ranked = []
    for entry in entries:
        source = str(entry.get("source") or "")
        ranked.append((seen[source], entry))
        seen[source] += 1
    return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]


def _tokenise(tokenizer: Any, text: str) -> Prompt:
    return Prompt(text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
