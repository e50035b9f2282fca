"""What a causal LM makes of the recipe's prompts: after every validation pass, into ``samples.jsonl`` of the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helixctl.checkpoint.atomic import write_text
from helixctl.decoding.speculative import DecodeOptions, decode_plain
from helixctl.engine.supervisor import Progress
from helixctl.errors import ModelError
from helixctl.lm_plan import CausalLMPlan
from helixctl.models.target import Target
from helixctl.training.state import TrainState

FILE = "samples.jsonl"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuation."""

    prompt: str
    text: str
    num_tokens: int


def as_target(plan: CausalLMPlan, model: Any) -> Target:
    """The model as what decoding works with: the same weights, whatever becomes of them.

    Raises:
        ModelError: the architecture is not one that can be decoded here.
    """
    return Target(model, plan.model, (), "segments", model.get_input_embeddings().weight.device)


def sample(plan: CausalLMPlan, target: Target, tokenizer: Any, prompts: Sequence[str]) -> list[Sample]:
    """Continue ``prompts`` until a stop token or ``validation.max_new_tokens``.

    Raises:
        UsageError: a prompt that leaves no room.
    """
    validation = plan.recipe.validation
    options = DecodeOptions(
        max_new_tokens=validation.max_new_tokens,
        stop_ids=frozenset(tokenizer.stop_token_ids),
        max_len=plan.model.max_positions or None,
        temperature=validation.temperature,
        seed=plan.recipe.run.seed,
    )
    ids = [tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id] for prompt in prompts]
    with torch.no_grad():
        decoded = decode_plain(target, ids, options)
    texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in decoded]
    return [Sample(p, text, len(one.tokens)) for p, text, one in zip(prompts, texts, decoded, strict=True)]


class Sampler:
    """Samples at the end of a validation pass, on the trainer's thread."""

    def __init__(self, plan: CausalLMPlan, tokenizer: Any, state: TrainState, progress: Progress) -> None:
        """``state``: the run's own; samples of later steps than its step are forgotten."""
        self._plan = plan
        self._tokenizer = tokenizer
        self._state = state
        self._progress = progress
        self._path = plan.recipe.run.dir / FILE
        self._target: Target | None = None
        _forget_after(self._path, state.step)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Write the samples; there is no metric in them."""
        try:
            self._target = self._target or as_target(self._plan, model)
        except ModelError as error:
            logger.warning("no samples: %s", error.message)
            return {}
        samples = sample(self._plan, self._target, self._tokenizer, self._plan.recipe.validation.prompts)
        self._progress.beat(f"{self._plan.trainer_role}-0")
        with self._path.open("a", encoding="utf-8") as file:
            for one in samples:
                file.write(json.dumps({"step": self._state.step, **vars(one)}, ensure_ascii=False) + "\n")
        for one in samples:
            logger.info("step %d: %s|%s", self._state.step, one.prompt, one.text)
        return {}


def _forget_after(path: Path, step: int) -> None:
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        if len(kept) != len(lines):
            write_text(path, "".join(f"{line}\n" for line in kept))
