"""helixctl's side of `scripts/judge`: what it computes from an export, written down for the other implementation.

Runs in helixctl's environment. Writes ``reference.safetensors`` and ``reference.json`` to the work folder.

Legend: S tokens of a row, A anchors, B block size, K taps, H width, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helixctl.checkpoint.convert import convert
from helixctl.checkpoint.export import ExportSource, export_drafter
from helixctl.checkpoint.published import open_published
from helixctl.data.batch import SlotBatch
from helixctl.decoding.speculative import DecodeOptions, decode_plain, decode_speculative
from helixctl.errors import HelixError, UsageError
from helixctl.models.drafters.dflash import plugin
from helixctl.models.drafters.dflash.options import Options
from helixctl.models.drafters.dflash.published import options_of
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions

PROMPTS = Path("recipes/prompts/quickstart.jsonl")
NUM_ANCHORS = 4
TINY_TAPS = (0, 1, 2)
"""Not the last layer: z-lab's loop reads its state after the final norm, helixctl before it."""
TINY_TARGETS = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3")


@dataclass(frozen=True)
class Lesson:
    """How a drafter learns a target's answers by heart."""

    answer_tokens: int
    steps: int
    anchors: int | None = None
    """Blocks per step; None: one for every token."""


TINY_LESSON = Lesson(answer_tokens=40, steps=400)


@dataclass(frozen=True)
class Case:
    """A target, a drafter read from its export, and the prompts, all float32 on the CPU."""

    target_dir: Path
    export_dir: Path
    target: Target
    drafter: nn.Module
    options: Options
    prompts: list[list[int]]
    max_new_tokens: int


def main() -> None:
    """Compute helixctl's side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tiny-target", choices=TINY_TARGETS, default="llama")
    parser.add_argument("--raw-embeddings", action="store_true")
    parser.add_argument("--export", type=Path, default=Path("demo/export"))
    parser.add_argument("--target", type=Path, default=Path("demo/target"))
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.tiny:
        make_tiny(arguments.work, arguments.tiny_target, scale_embeddings=not arguments.raw_embeddings)
        prompts = tiny_prompts(arguments.num_prompts, seed=1)
        case = load_case(arguments.work / "target", arguments.work / "export", prompts, arguments.max_new_tokens)
    else:
        for folder in (arguments.target, arguments.export):
            if not (folder / "config.json").is_file():
                raise UsageError(f"{folder} holds no config.json", fix="give --target and --export, or --tiny")
        prompts = read_prompts(arguments.prompts, arguments.target, arguments.num_prompts)
        case = load_case(arguments.target, arguments.export, prompts, arguments.max_new_tokens)
    write_reference(case, arguments.work)


def load_case(target_dir: Path, export_dir: Path, prompts: list[list[int]], max_new_tokens: int) -> Case:
    """Read target and export back from their folders."""
    published = open_published(export_dir).describe()
    target = load_target(target_dir, published.taps)
    options = options_of(published)
    drafter = plugin.build(options, target.facts, target.taps, 0)
    plugin.import_state(drafter, load_file(export_dir / "model.safetensors"))
    return Case(target_dir, export_dir, target, drafter, options, prompts, max_new_tokens)


def load_target(folder: Path, taps: tuple[int, ...]) -> Target:
    """The target in float32 on the CPU."""
    return Target.load(TargetOptions(model=str(folder), dtype="float32"), taps, "cpu", torch.float32)


def read_prompts(path: Path, target_dir: Path, count: int) -> list[list[int]]:
    """``count`` prompts spread over a file, as token ids with the target's chat template; as plain text without one."""
    from transformers import AutoTokenizer

    from helixctl.data.prompts import Prompt
    from helixctl.data.prompts import read_prompts as read_file

    found = [prompt for prompt in read_file(path) if isinstance(prompt, Prompt)]
    if not found:
        raise UsageError(f"{path} holds no prompts", fix="give another file with --prompts")
    tokenizer: Any = AutoTokenizer.from_pretrained(str(target_dir))
    chosen = itertools.islice(found, 0, None, max(len(found) // count, 1))
    messages = [list(prompt.messages) for prompt in itertools.islice(chosen, count)]
    if tokenizer.chat_template is None:
        return [tokenizer(one[-1]["content"])["input_ids"] for one in messages]
    rendered = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True) for m in messages]
    return [[int(token) for token in one["input_ids"]] for one in rendered]


def write_reference(case: Case, work: Path) -> None:
    """Answers with and without the drafter, then features and block logits on one answer."""
    stop_ids = sorted(case.target.facts.eos_token_ids)
    options = DecodeOptions(max_new_tokens=case.max_new_tokens, stop_ids=frozenset(stop_ids), batch_size=1)
    plain = decode_plain(case.target, case.prompts, options)
    policy = plugin.policy(case.drafter, case.target.shared)
    drafted = decode_speculative(case.target, policy, case.prompts, options)
    longest = max(drafted, key=lambda one: len(one.tokens))
    row = torch.tensor([*longest.prompt_ids, *longest.tokens])
    save_file(block_reference(case, row, len(longest.prompt_ids)), work / "reference.safetensors")
    answers = [
        {"prompt": prompt, "tokens": list(one.tokens), "accepted": list(one.accepted), "plain": list(alone.tokens)}
        for prompt, one, alone in zip(case.prompts, drafted, plain, strict=True)
    ]
    target = str(case.target_dir.resolve())
    said = open_published(case.export_dir).describe()
    if said.embedding_scale == 1.0 and said.logit_softcap is None:  # the speculators format can say it
        convert(case.export_dir, work / "speculators", "speculators", target=target, facts=case.target.facts)
    reference = {
        "target": target,
        "export": str(case.export_dir.resolve()),
        "speculators_export": str(work / "speculators"),
        "max_new_tokens": case.max_new_tokens,
        "stop_ids": stop_ids,
        "answers": answers,
    }
    (work / "reference.json").write_text(json.dumps(reference), encoding="utf-8")


@torch.no_grad()
def block_reference(case: Case, ids: Tensor, prompt_len: int) -> dict[str, Tensor]:
    """Features of one row, and block logits at some anchors: of the training forward and of the decode policy.

    Returns:
        ids [S], features [S, K*H], anchors [A], train_logits and decode_logits [A, B-1, V].
    """
    target, size, length = case.target, case.options.block_size, len(ids)
    positions = torch.arange(length)[None]
    _, features = target.decode_step(ids[None], positions, target.new_cache(1, length))
    last = length - size
    anchors = torch.linspace(prompt_len, max(last, prompt_len), NUM_ANCHORS).long().unique()
    slot = make_slot(ids, features, anchors)
    hidden = case.drafter(slot, target.shared)[0]  # [A, B, H]
    policy = plugin.policy(case.drafter, target.shared)
    decode_logits = []
    for anchor in anchors.tolist():
        policy.start(1, length)
        policy.extend([f[:, :anchor] for f in features], positions[:, :anchor], torch.ones(1, anchor, dtype=torch.bool))
        decode_logits.append(policy.draft_logits(ids[anchor][None], torch.tensor([anchor]))[0])
    return {
        "ids": ids,
        "features": torch.cat(features, dim=-1)[0].contiguous(),
        "anchors": anchors,
        "train_logits": target.shared.logits(hidden[:, 1:]).contiguous(),
        "decode_logits": torch.stack(decode_logits),
    }


def make_slot(ids: Tensor, features: list[Tensor], anchors: Tensor) -> SlotBatch:
    """One row with one document."""
    length = len(ids)
    return SlotBatch(
        features=features,
        input_ids=ids[None],
        position_ids=torch.arange(length)[None],
        document_ids=torch.zeros(1, length, dtype=torch.int32),
        loss_mask=torch.ones(1, length, dtype=torch.bool),
        anchors=anchors[None],
        anchor_valid=torch.ones(1, len(anchors), dtype=torch.bool),
    )


def tiny_prompts(count: int, seed: int) -> list[list[int]]:
    """Random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, 128, (6 + 3 * i,), generator=generator).tolist() for i in range(count)]


def make_tiny(work: Path, kind: str, *, scale_embeddings: bool) -> None:
    """A random target, and a drafter trained on its answers for seconds, so that some drafts are accepted."""
    from tests import tiny

    tiny.save_tiny(getattr(tiny, f"tiny_{kind}")(initializer_range=0.15), work / "target")
    target = load_target(work / "target", TINY_TAPS)
    options = Options(
        num_layers=2,
        target_layer_ids=TINY_TAPS,
        block_size=6,
        mask_token_id=5,
        rope_theta=5000.0,
        scale_embeddings=scale_embeddings,
    )
    drafter = overfit(target, options, tiny_prompts(6, seed=1) + tiny_prompts(6, seed=2), TINY_LESSON)
    export_drafter(drafter, ExportSource(options, target.facts, TINY_TAPS, "target"), work / "export")


def overfit(target: Target, options: Options, prompts: list[list[int]], lesson: Lesson) -> nn.Module:
    """A small drafter that knows the target's own greedy answers, also those of the judged prompts."""
    drafter = plugin.build(options, target.facts, target.taps, 0)
    answers = decode_plain(target, prompts, DecodeOptions(max_new_tokens=lesson.answer_tokens))
    slots = []
    for answer in answers:
        ids = torch.tensor([*answer.prompt_ids, *answer.tokens])
        positions = torch.arange(len(ids))[None]
        _, features = target.decode_step(ids[None], positions, target.new_cache(1, len(ids)))
        anchors = torch.arange(len(answer.prompt_ids), len(ids) - 1)
        slots.append(make_slot(ids, features, anchors[: lesson.anchors]))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for step in range(lesson.steps):
        terms = drafter.loss(slots[step % len(slots)], target.shared)
        optimizer.zero_grad()
        (terms.numerator / terms.denominator).backward()
        optimizer.step()
    return drafter


if __name__ == "__main__":
    try:
        main()
    except HelixError as error:
        sys.exit(f"error: {error}")
