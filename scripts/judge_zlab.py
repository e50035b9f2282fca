"""z-lab's side of `scripts/judge`: loads target and export with PyPI dflash and compares with what helixctl wrote down.

Runs in an environment without helixctl. Exits with 1 when anything differs by more than float32 rounding.

Legend: S tokens of a row, A anchors, B block size, K taps, H width, V vocabulary.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import dflash.model
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from scripts.judge_common import (
    Verdict,
    judge_answer,
    judge_loading,
    judge_numbers,
    read_arguments,
    relative,
    report,
)


def main() -> int:
    """Compare everything and report."""
    work, path, reference = read_arguments(__doc__)
    dflash.model._cuda_time = time.perf_counter  # it would wait for a GPU
    # Eager: the other kernels leave out the caps on attention scores that some targets have.
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    target = AutoModelForCausalLM.from_pretrained(reference["target"], **options).eval()
    drafter, loading = dflash.model.DFlashDraftModel.from_pretrained(
        reference["export"], dtype=torch.float32, output_loading_info=True
    )
    drafter.eval()
    verdicts = [judge_loading(loading)]
    verdicts += judge_blocks(target, drafter, load_file(work / "reference.safetensors"))
    verdicts += judge_answers(target, drafter, reference)
    return report("dflash 0.1.0", verdicts, path)


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
        sizes = (reference["max_new_tokens"], drafter.block_size)
        verdicts += judge_answer(number, answer, (tokens, result.acceptance_lengths), sizes)
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
