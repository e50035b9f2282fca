"""SpecForge's side of `scripts/judge`: loads target and export with PyPI specforge and compares with helixctl's.

Afterwards it writes the drafter in its own way, for helixctl to read. Runs in an environment without helixctl; exits
with 1 when anything differs by more than float32 rounding.

Legend: A anchors, B block size, K taps, H width, V vocabulary.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file
from specforge.modeling.draft.dflash import DFlashDraftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from scripts.judge_common import Verdict, judge_answer, judge_loading, judge_numbers, read_arguments, relative, report


def main() -> int:
    """Compare everything and report."""
    work, path, reference = read_arguments(__doc__)
    # Eager: the other kernels leave out the caps on attention scores that some targets have.
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    target = AutoModelForCausalLM.from_pretrained(reference["target"], **options).eval()
    drafter, loading = DFlashDraftModel.from_pretrained(
        reference["export"], dtype=torch.float32, output_loading_info=True
    )
    drafter.eval()
    verdicts = [judge_loading(loading)]
    verdicts += judge_blocks(target, drafter, load_file(work / "reference.safetensors"))
    verdicts += judge_answers(target, drafter, reference)
    drafter.to(torch.bfloat16).save_pretrained(str(work / "written"))
    return report("specforge 0.2.0", verdicts, path)


@torch.inference_mode()
def judge_blocks(target: Any, drafter: Any, expected: dict[str, Tensor]) -> list[Verdict]:
    """Block logits for the same features, against training forward and decode policy."""
    ids, features, size = expected["ids"], expected["features"], drafter.block_size
    blocks = []
    for anchor in expected["anchors"].tolist():
        block = torch.full((1, size), drafter.mask_token_id)
        block[0, 0] = ids[anchor]
        hidden = drafter(
            target_hidden=features[None, :anchor],
            noise_embedding=target.model.embed_tokens(block),
            position_ids=torch.arange(anchor + size)[None],
            is_causal=False,
        )
        blocks.append(target.lm_head(hidden[0, 1:]))
    logits = torch.stack(blocks)  # [A, B-1, V]
    return [
        judge_numbers("block logits, training forward", relative(logits, expected["train_logits"])),
        judge_numbers("block logits, decode policy", relative(logits, expected["decode_logits"])),
    ]


def judge_answers(target: Any, drafter: Any, reference: dict[str, Any]) -> list[Verdict]:
    """Greedy answers; its loop does not tell the accepted tokens of a cycle, so they are counted at its target."""
    verdicts = []
    for number, answer in enumerate(reference["answers"]):
        crops: list[int] = []
        tokens = generate(target, drafter, answer["prompt"], reference, crops)
        size, longest = drafter.block_size, reference["max_new_tokens"]
        end = len(answer["prompt"]) + longest - 1  # it counts accepted tokens beyond the longest answer too
        accepted = [min(b, end) - a for a, b in zip([len(answer["prompt"]), *crops], crops, strict=False)]
        verdicts += judge_answer(number, answer, (tokens, accepted), (longest, size))
    return verdicts


def generate(target: Any, drafter: Any, prompt: list[int], reference: dict[str, Any], crops: list[int]) -> list[int]:
    """The answer's tokens; ``crops`` gets the length of the target's cache after every cycle."""
    import specforge.modeling.draft.dflash as module

    made: list[Any] = []

    class Cache(module.DynamicCache):  # type: ignore[misc]
        """Tells how far the target's cache is kept."""

        def crop(self, max_length: int) -> None:
            if self is made[0]:
                crops.append(max_length)
            super().crop(max_length)

    def new_cache() -> Any:
        made.append(Cache())
        return made[-1]

    usual, module.DynamicCache = module.DynamicCache, new_cache
    try:
        output = drafter.spec_generate(
            target, torch.tensor([prompt]), reference["max_new_tokens"], reference["stop_ids"] or None, 0.0
        )
    finally:
        module.DynamicCache = usual
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
