"""Scores an exported drafter with PyPI dflash alone, beside what helixctl measured on the same prompts.

    .venv-judge-zlab/bin/python -m scripts.judge_score --target DIR --export DIR --bench FILE [--against LINES]

Runs in the environment that `scripts/judge` makes, without helixctl. A prompt's number is the mean of the tokens that
`dflash_generate` emitted per forward of the target, a file's score the mean of its prompts. First turns, greedy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import dflash.model
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROUNDING = 1e-4
"""Numbers of helixctl have four digits."""


def main() -> None:
    """Decode every prompt, one line of JSON each, and print the scores."""
    options = parse_options()
    if options.device == "cpu":
        dflash.model._cuda_time = time.perf_counter  # it would wait for a GPU
    kind = {"dtype": getattr(torch, options.dtype)}
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, **kind).eval().to(options.device)
    drafter = dflash.model.DFlashDraftModel.from_pretrained(options.export, **kind).eval().to(options.device)
    ours = read_ours(options.against)
    scores: dict[str, list[float | None]] = {}
    known = read_known(options.out)
    for path in options.bench:
        own = scores.setdefault(path.stem, [])
        for record in islice(records(path), options.skip, options.skip + options.limit):
            key = (path.stem, str(record["id"]))
            if key not in known:
                known[key] = judge(target, drafter, tokenizer, record, options.max_new_tokens)
                append(options.out, {"source": key[0], "id": key[1], "accept_len": known[key]})
            own.append(known[key])
    for source, own in scores.items():
        print(said(own, ours.get(source, []), source), flush=True)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--export", required=True)
    parser.add_argument("--bench", action="append", type=Path, required=True, metavar="FILE")
    parser.add_argument("--skip", type=int, default=0, help="prompts of every file")
    parser.add_argument("--limit", type=int, default=20, help="prompts of every file")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--against", type=Path, help="lines of `scripts/benchmark ablation`: the last one is compared")
    parser.add_argument("--out", type=Path, help="JSON lines, read and appended to: a second call goes on")
    return parser.parse_args()


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts of a file."""
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def judge(target: Any, drafter: Any, tokenizer: Any, record: dict[str, Any], max_new_tokens: int) -> float | None:
    """Mean tokens per forward of the target; None where the first token was the whole answer."""
    said = [{"role": "user", "content": record["turns"][0]}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    stop = target.generation_config.eos_token_id
    found = dflash.model.dflash_generate(
        drafter,
        target,
        ids["input_ids"].to(target.device),
        max_new_tokens,
        stop if isinstance(stop, list) else [stop],
        return_stats=True,
    )
    return statistics.fmean(found.acceptance_lengths) if found.acceptance_lengths else None


def read_ours(path: Path | None) -> dict[str, list[float | None]]:
    """Numbers of helixctl by file, prompt by prompt."""
    if path is None:
        return {}
    line = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    found: dict[str, list[float | None]] = json.loads(line["output"].rstrip().rpartition("\n")[2])["prompts"]
    return found


def read_known(path: Path | None) -> dict[tuple[str, str], float | None]:
    """What an earlier call decoded."""
    if path is None or not path.exists():
        return {}
    return {(line["source"], line["id"]): line["accept_len"] for line in records(path)}


def append(path: Path | None, line: dict[str, Any]) -> None:
    """Keep one prompt's number."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def said(own: list[float | None], ours: list[float | None], source: str) -> str:
    """The score of a file, and how far helixctl's numbers are from it."""
    values = [value for value in own if value is not None]
    text = f"{source}: {statistics.fmean(values):.3f} over {len(values)} prompts"
    both = [(a, b) for a, b in zip(own, ours, strict=False) if a is not None and b is not None]
    if not both:
        return text
    apart = [abs(a - b) for a, b in both]
    equal = sum(distance < ROUNDING for distance in apart)
    mean = statistics.fmean(b for _, b in both)
    return f"{text}; helixctl {mean:.3f}; {equal} of {len(both)} prompts equal, at most {max(apart):.3f} apart"


if __name__ == "__main__":
    main()
