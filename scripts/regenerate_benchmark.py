#!/usr/bin/env python3
"""Measures the answering of `prepare --regenerate` against plain `model.generate`: one line of JSON.

Both answer the same prompts greedily, as many at a time, up to so many new tokens, in the same dtype; both are warm.
The ratio is that of answer tokens per second. Loading and capturing are not in it: `start_s` tells what our first batch
took, capture included.

    scripts/regenerate_benchmark.py MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helixctl.data.prompts import Prompt, read_prompts
from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.steady import SteadyDecoder
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions

TASKS = (
    "A shop sells {a} apples a day at {b} cents each. How much does it take in over {c} days? Explain every step.",
    "Write a Python function that returns the {a} smallest numbers of a list that {b} divides, and a test of it.",
    "Tell a short story about {a} sailors who reach an island after {b} days at sea and find {c} strange trees.",
    "Explain to a child why {a} times {b} is the same as {b} times {a}, with an example from the kitchen.",
)
"""Prompts where none are given: their answers are of many lengths."""


def main() -> None:
    options = parse_options()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    prompts = sorted(encode(tokenizer, options), key=len, reverse=True)
    target = Target.load(TargetOptions(model=str(options.model)), [0], device, dtype)
    stop_ids = frozenset({*target.facts.eos_token_ids, tokenizer.eos_token_id} - {None})
    ours = measure_ours(target, prompts, stop_ids, options)
    del target
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    model.to(device).eval()
    plain = measure_plain(model, prompts, stop_ids, options)
    found = {
        "ratio": ours["tokens_per_s"] / plain["tokens_per_s"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "prompts": len(prompts),
        "batch_size": options.batch_size,
        "max_new_tokens": options.max_new_tokens,
        "identical": sum(a == b for a, b in zip(ours.pop("answers"), plain.pop("answers"), strict=True)),
        "ours": ours,
        "generate": plain,
    }
    print(json.dumps(found, default=lambda number: round(number, 3)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of an instruction-tuned model")
    parser.add_argument("--prompts", type=Path, help="JSONL as for --regenerate; made-up tasks if left out")
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def encode(tokenizer: Any, options: argparse.Namespace) -> list[list[int]]:
    """Token ids of every prompt, up to where the answer begins."""
    if options.prompts is None:
        texts = [TASKS[i % len(TASKS)].format(a=3 + i, b=7 + 2 * i, c=2 + i % 5) for i in range(options.num_prompts)]
        chats: list[Any] = [[{"role": "user", "content": text}] for text in texts]
    else:
        chats = [list(found.messages) for found in read_prompts(options.prompts) if isinstance(found, Prompt)]
    rendered = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats[: options.num_prompts]
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in rendered]


def measure_ours(
    target: Target, prompts: Sequence[Sequence[int]], stop_ids: frozenset[int], options: argparse.Namespace
) -> dict[str, Any]:
    """The decoder of fixed shapes: first one batch, which captures, then all."""
    decoder = SteadyDecoder(target)
    decode = DecodeOptions(options.max_new_tokens, stop_ids, batch_size=options.batch_size)
    began_at = time.perf_counter()
    list(decoder.stream(prompts[: options.batch_size], decode))
    start_s = time.perf_counter() - began_at
    began_at = time.perf_counter()
    found = dict(decoder.stream(prompts, decode))
    elapsed_s = time.perf_counter() - began_at
    return account([list(found[i].tokens) for i in range(len(prompts))], elapsed_s) | {"start_s": start_s}


def measure_plain(
    model: Any, prompts: Sequence[Sequence[int]], stop_ids: frozenset[int], options: argparse.Namespace
) -> dict[str, Any]:
    """`generate`, batch by batch, padded on the left."""
    generate_batch(model, prompts[: options.batch_size], stop_ids, 4)
    began_at = time.perf_counter()
    answers: list[list[int]] = []
    for start in range(0, len(prompts), options.batch_size):
        batch = prompts[start : start + options.batch_size]
        answers += generate_batch(model, batch, stop_ids, options.max_new_tokens)
    return account(answers, time.perf_counter() - began_at)


def generate_batch(
    model: Any, prompts: Sequence[Sequence[int]], stop_ids: frozenset[int], max_new_tokens: int
) -> list[list[int]]:
    """Answers up to and including their stop token."""
    width = max(len(prompt) for prompt in prompts)
    pad = min(stop_ids, default=0)
    ids = torch.tensor([[*[pad] * (width - len(prompt)), *prompt] for prompt in prompts], device=model.device)
    mask = torch.tensor([[*[0] * (width - len(prompt)), *[1] * len(prompt)] for prompt in prompts], device=model.device)
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(stop_ids),
            pad_token_id=pad,
        )
    return [clipped(row, stop_ids) for row in out[:, width:].tolist()]


def clipped(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return list(tokens[:end])


def account(answers: list[list[int]], elapsed_s: float) -> dict[str, Any]:
    tokens = sum(map(len, answers))
    return {"seconds": elapsed_s, "tokens": tokens, "tokens_per_s": tokens / elapsed_s, "answers": answers}


if __name__ == "__main__":
    main()
