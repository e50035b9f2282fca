"""z-lab's side of `scripts/judge`: loads target and export with PyPI dflash and compares with what helixctl wrote down.

Runs in an environment without helixctl. Exits with 1 when anything differs by more than float32 rounding.

Legend: S tokens of a row, A anchors, B block size, K taps, H width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dflash.model
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4
"""Of relative differences: two float32 implementations of the same thing are at 1e-6."""


@dataclass(frozen=True)
class Verdict:
    """One comparison."""

    what: str
    equal: bool
    detail: str


def main() -> int:
    """Compare everything and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    reference = json.loads((arguments.work / "reference.json").read_text(encoding="utf-8"))
    dflash.model._cuda_time = time.perf_counter  # it would wait for a GPU
    target = AutoModelForCausalLM.from_pretrained(reference["target"], dtype=torch.float32).eval()
    drafter, loading = dflash.model.DFlashDraftModel.from_pretrained(
        reference["export"], dtype=torch.float32, output_loading_info=True
    )
    drafter.eval()
    verdicts = [judge_loading(loading)]
    verdicts += judge_blocks(target, drafter, load_file(arguments.work / "reference.safetensors"))
    verdicts += judge_answers(target, drafter, reference)
    return report(verdicts, arguments.json)


def judge_loading(loading: dict[str, Any]) -> Verdict:
    """Every tensor has its place, and no place is left without one."""
    troubles = {kind: sorted(map(str, names)) for kind, names in loading.items() if names}
    return Verdict("tensor names and shapes", not troubles, str(troubles) if troubles else "all found")


@torch.inference_mode()
def judge_blocks(target: Any, drafter: Any, reference: dict[str, Tensor]) -> list[Verdict]:
    """Features of the row, and block logits for the same features, against training forward and decode policy."""
    ids, features = reference["ids"], reference["features"]
    states = target(ids[None], output_hidden_states=True).hidden_states
    own = dflash.model.extract_context_feature(states, drafter.target_layer_ids)[0]  # [S, K*H]
    taps = len(drafter.target_layer_ids)
    worst = max(relative(a, b) for a, b in zip(own.chunk(taps, -1), features.chunk(taps, -1), strict=True))
    logits = torch.stack([block_logits(target, drafter, features, ids, int(a)) for a in reference["anchors"]])
    return [
        judge_numbers("features of all taps", worst),
        judge_numbers("block logits, training forward", relative(logits, reference["train_logits"])),
        judge_numbers("block logits, decode policy", relative(logits, reference["decode_logits"])),
    ]


def block_logits(target: Any, drafter: Any, features: Tensor, ids: Tensor, anchor: int) -> Tensor:
    """Logits [B-1, V] of the block at ``anchor``, from features [S, K*H] before it."""
    block = torch.full((1, drafter.block_size), drafter.mask_token_id)
    block[0, 0] = ids[anchor]
    scale = float(dflash.model._draft_value(drafter.config, "input_embedding_scale", 1.0))
    hidden = drafter(
        target_hidden=features[None, :anchor],
        noise_embedding=dflash.model._raw_input_embeddings(target, block, scale),
        position_ids=torch.arange(anchor + drafter.block_size)[None],
    )
    logits: Tensor = drafter.compute_logits(hidden[0, 1:], dflash.model._output_head(target))
    return logits


def judge_answers(target: Any, drafter: Any, reference: dict[str, Any]) -> list[Verdict]:
    """Greedy answers and the tokens that every cycle emitted."""
    verdicts = []
    for number, answer in enumerate(reference["answers"]):
        result = dflash.model.dflash_generate(
            drafter,
            target,
            torch.tensor([answer["prompt"]]),
            reference["max_new_tokens"],
            reference["stop_ids"] or None,
            return_stats=True,
        )
        tokens = result.output_ids[0, result.num_input_tokens :].tolist()
        cycles, ours = (
            full_cycles(accepted, reference["max_new_tokens"], drafter.block_size)
            for accepted in (result.acceptance_lengths, answer["accepted"])
        )
        mean = sum(cycles) / len(cycles) if cycles else float("nan")
        verdicts += [
            judge_list(f"answer {number}, tokens", answer["tokens"], tokens, f"{len(tokens)} tokens"),
            judge_list(f"answer {number}, plain tokens", answer["plain"], tokens, "helixctl without a drafter"),
            judge_list(f"answer {number}, accepted", ours, cycles, f"{len(cycles)} full cycles, mean {mean:.3f}"),
        ]
    return verdicts


def full_cycles(accepted: list[int], max_new_tokens: int, block_size: int) -> list[int]:
    """The cycles that drafted a whole block.

    Near the length limit z-lab drafts a shorter block, helixctl (as serving engines do) a whole one whose end is not
    verified. All slots of a block see each other, so the drafts may then differ, and the answers do not.
    """
    emitted, full = 1, []  # the prefill emits the first token
    for count in accepted:
        if max_new_tokens - emitted + 1 < block_size:
            break
        full.append(count)
        emitted += count
    return full


def judge_numbers(what: str, difference: float) -> Verdict:
    """Equal up to rounding; NaN is not."""
    return Verdict(what, difference <= TOLERANCE, f"largest relative difference {difference:.1e}")


def judge_list(what: str, ours: list[int], theirs: list[int], detail: str) -> Verdict:
    """Equal entry by entry, or where they part."""
    if ours == theirs:
        return Verdict(what, True, detail)
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return Verdict(what, False, f"differ from entry {first}: helixctl {ours[first:][:6]}, z-lab {theirs[first:][:6]}")


def relative(one: Tensor, other: Tensor) -> float:
    """Largest difference, each over its own value plus the mean value; infinite where shapes differ.

    Not over the largest value: single dimensions of a real target's features are a thousand times the others.
    """
    if one.shape != other.shape:
        return float("inf")
    size = other.abs()
    return float(((one - other).abs() / (size + size.mean())).max())


def report(verdicts: list[Verdict], path: Path | None) -> int:
    """Print the table and the JSON."""
    width = max(len(v.what) for v in verdicts)
    for v in verdicts:
        print(f"{v.what:<{width}}  {'equal' if v.equal else 'DIFFERS':<8} {v.detail}")
    result = {
        "judge": "dflash 0.1.0",
        "equal": all(v.equal for v in verdicts),
        "verdicts": [asdict(v) for v in verdicts],
    }
    text = json.dumps(result)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
