"""Held-out prompts as token ids, and the acceptance length of a drafter on them by real decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helixctl.data.store import Store
from helixctl.decoding.decoded import Decoded, DecodeOptions, accept_len
from helixctl.decoding.policy import DraftPolicy
from helixctl.decoding.speculative import decode_speculative
from helixctl.errors import DataError
from helixctl.models.shared import SharedWeights
from helixctl.plan import Plan
from helixctl.training.build import Control, Targets, drafter_plugin

LIVE_NEW_TOKENS = 48
"""Longest answer of live decoding during training: enough cycles for a trend, few enough to cost seconds."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the user wrote it, and as the target reads it."""

    text: str
    ids: tuple[int, ...]


def held_out_prompts(store: Store, tokenizer: Any, limit: int) -> list[Prompt]:
    """The first ``limit`` prompts of the validation documents, rendered with the target's chat template."""
    return [_render(tokenizer, entry) for entry in store.prompts()[:limit]]


def prompts_from_file(path: Path, tokenizer: Any, limit: int | None = None) -> list[Prompt]:
    """Prompts of a JSONL file with ``prompt``, ``messages`` or ``turns`` (the first turn) in every line.

    Raises:
        DataError: the file is missing or empty, a line is not JSON, or holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read prompts from {path}: {error.strerror}", fix="check --prompts") from error
    found = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise DataError(f"{path} holds no prompt", fix='write one JSON object per line: {"prompt": "..."}')
    return [_render(tokenizer, entry) for entry in found[:limit]]


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
        self._prompts = prompts
        self._options = replace(options, max_new_tokens=min(options.max_new_tokens, LIVE_NEW_TOKENS))

    def __call__(self, model: nn.Module) -> float:
        """Mean emitted tokens per verify cycle over all prompts; 0 where no prompt needed a cycle."""
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
        return accept_len(answers) or 0.0


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

    def draft(self, anchor_ids: Tensor, positions: Tensor) -> Tensor:
        """As the drafter's own."""
        return self._policy.draft(anchor_ids, positions)


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
        max_len=plan.target.max_positions,
    )


def answer_text(tokenizer: Any, decoded: Decoded) -> str:
    """The answer as text, special tokens left out."""
    text: str = tokenizer.decode(list(decoded.tokens), skip_special_tokens=True)
    return text


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not JSON: {error}", fix="fix or delete the line") from error
    if isinstance(entry, dict):
        if isinstance(entry.get("prompt"), str):
            return {"messages": [{"role": "user", "content": entry["prompt"]}]}
        if isinstance(entry.get("turns"), list) and entry["turns"]:
            return {"messages": [{"role": "user", "content": str(entry["turns"][0])}]}
        if isinstance(entry.get("messages"), list) and entry["messages"]:
            return {"messages": entry["messages"]}
    raise DataError(
        f"{path}:{number}: no prompt in this line", fix='use {"prompt": "..."}, {"turns": [...]} or {"messages": [...]}'
    )


def _render(tokenizer: Any, entry: dict[str, Any]) -> Prompt:
    if "text" in entry:
        ids = tokenizer(entry["text"], add_special_tokens=False)["input_ids"]
        return Prompt(entry["text"], tuple(ids))
    messages = entry["messages"]
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    rendered = tokenizer.apply_chat_template(
        messages, tools=entry.get("tools") or None, add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return Prompt(str(messages[-1].get("content", "")), tuple(ids))
