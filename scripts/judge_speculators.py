"""speculators' side of `scripts/judge`: loads target and export with PyPI speculators and compares with helixctl's.

Two ways: the export in its own format, and the z-lab one through its own converter. The library trains and leaves
decoding to vLLM, so there are no answers to compare. Afterwards it writes the drafter in its own way, for
helixctl to read. Runs in an environment without helixctl; exits with 1 when anything differs beyond rounding.

Legend: S tokens of a row, A anchors, B block size, K taps, H width, V vocabulary.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.convert.dflash import DFlashConverter
from torch import Tensor

from scripts.judge_common import Verdict, judge_numbers, read_arguments, relative, report


def main() -> int:
    """Compare everything and report."""
    work, path, reference = read_arguments(__doc__)
    expected = load_file(work / "reference.safetensors")
    verdicts = judge_folder("own format", Path(reference["speculators_export"]), expected)
    converted = work / "converted"
    DFlashConverter().convert(reference["export"], converted, reference["target"], validate=False)
    verdicts += judge_folder("converted by it", converted, expected)
    verdicts += judge_config(Path(reference["speculators_export"]), converted)
    load(Path(reference["speculators_export"])).save_pretrained(str(work / "written"))
    return report("speculators 0.9.0", verdicts, path)


def judge_folder(what: str, folder: Path, expected: dict[str, Tensor]) -> list[Verdict]:
    """Block logits of the drafter in one folder against training forward and decode policy."""
    model = load(folder)
    unset = [name for name, tensor in model.state_dict().items() if bool(tensor.isnan().any())]
    logits = block_logits(model, expected)
    return [
        Verdict(f"{what}: every weight is set", not unset, ", ".join(unset) or f"{len(model.state_dict())} tensors"),
        judge_numbers(f"{what}: block logits, training forward", relative(logits, expected["train_logits"])),
        judge_numbers(f"{what}: block logits, decode policy", relative(logits, expected["decode_logits"])),
    ]


def judge_config(ours: Path, theirs: Path) -> list[Verdict]:
    """What its converter writes of the z-lab export, key by key."""
    one, other = (DFlashSpeculatorConfig.from_pretrained(str(folder)) for folder in (ours, theirs))
    verdicts = []
    for key in ("aux_hidden_state_layer_ids", "block_size", "mask_token_id", "draft_vocab_size", "sample_from_anchor"):
        own, converted = getattr(one, key), getattr(other, key)
        verdicts.append(Verdict(f"config: {key}", own == converted, f"helixctl {own}, its converter {converted}"))
    counts = [
        [method.speculative_tokens for method in config.speculators_config.proposal_methods] for config in (one, other)
    ]
    verdicts.append(Verdict("config: speculative_tokens", counts[0] == counts[1], f"{counts[0]} and {counts[1]}"))
    return verdicts


def load(folder: Path) -> Any:
    """A drafter in float32 that computes attention eagerly: its usual kernel is compiled for GPUs."""
    config = DFlashSpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return DFlashDraftModel.from_pretrained(str(folder), config=config, dtype=torch.float32).float().eval()


@torch.inference_mode()
def block_logits(model: Any, expected: dict[str, Tensor]) -> Tensor:
    """Logits [A, B-1, V] at the anchors, which its sampler takes where they alone are supervised."""
    size, anchors = model.block_size, expected["anchors"]
    # It never takes an anchor from the last B positions.
    ids = torch.nn.functional.pad(expected["ids"], (0, size))[None]  # [1, S + B]
    features = torch.nn.functional.pad(expected["features"], (0, 0, 0, size))[None]
    loss_mask = torch.zeros(ids.shape)
    loss_mask[0, anchors] = 1
    _, logits, *_ = model._backbone_forward(
        features,
        ids,
        loss_mask,
        torch.zeros(1, ids.shape[1], features.shape[-1] // len(model.target_layer_ids)),
        torch.zeros(ids.shape, dtype=torch.long),
        max_anchors=len(anchors),
    )
    return logits[0].unflatten(0, (len(anchors), size))[:, 1:]  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
