"""The format of the authors' own trainer, DeepSpec, which vLLM serves: a flat Qwen3 configuration. Never imports torch.

``block_size`` counts slots there, all of which draft: one less than ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helixctl.errors import CheckpointError
from helixctl.models.drafters.dflash.formats import zlab
from helixctl.models.drafters.dflash.published import Published, unsaid

ARCHITECTURE = "Qwen3DSparkModel"
ENGINES = ("vLLM",)
"""Serving engines that load it."""


def matches(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return ARCHITECTURE in (config.get("architectures") or ())


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """The backbone in z-lab's keys; the other keys stay where they are."""
    size = config.get("block_size")
    section = {
        "block_size": None if size is None else int(size) + 1,
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": config.get("target_layer_ids"),
        "causal": False,
    }
    return {**config, zlab.SECTION: section}


def read(config: Mapping[str, Any]) -> Published:
    """What the configuration says.

    Raises:
        CheckpointError: keys are missing, or it describes a drafter that helixctl cannot compute; names all of them.
    """
    wrong = unsupported(config)
    if wrong:
        raise CheckpointError(f"this drafter cannot be used: {'; '.join(wrong)}", fix="see `helixctl export --check`")
    return replace(zlab.read(flatten(config)), markov_rank=int(config["markov_rank"]))


def write(drafter: Published) -> dict[str, Any]:
    """``config.json`` with every key that DeepSpec and vLLM read.

    Raises:
        CheckpointError: the format has no key for what the target needs, or the target's layers are not known.
    """
    if drafter.num_target_layers is None:
        raise CheckpointError("the format needs the number of the target's layers", fix="give --target MODEL")
    if unsaid(drafter):
        raise CheckpointError(f"the target {unsaid(drafter)}, which the format cannot say", fix="use another algorithm")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": drafter.block_size - 1,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.taps),
        "num_target_layers": drafter.num_target_layers,
        "markov_rank": drafter.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_anchors": 512,  # of training alone, but its loader wants one
        **zlab.decoder_keys(drafter),
        "tie_word_embeddings": False,
    }


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """What helixctl's drafter does not have, or has and is missing."""
    found = {
        "it has no sequential head": not config.get("markov_rank"),
        f"its sequential head is {config.get('markov_head_type')!r}": config.get("markov_head_type") != "vanilla",
        "it has no confidence head": not config.get("enable_confidence_head"),
        "its confidence head does not see the token before": not config.get("confidence_head_with_markov"),
        "target_layer_ids is missing": config.get("target_layer_ids") is None,
    }
    return [what for what, holds in found.items() if holds]
