"""The format of the speculators library (0.9), which vLLM serves by the drafter's name alone. Never imports torch.

The decoder's keys are nested in ``transformer_layer_config``; tapped layers are counted from 1 (the residual stream
after so many layers); the target is named in ``speculators_config.verifier``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helixctl.errors import CheckpointError
from helixctl.models.drafters.dflash.formats import zlab
from helixctl.models.drafters.dflash.published import Published, unsaid

VERSION = "0.9.0"
"""Of the library whose schema this is."""
ENGINES = ("vLLM",)
"""Serving engines that load it."""


def matches(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this format."""
    return config.get("speculators_model_type") == "dflash"


def read(config: Mapping[str, Any]) -> Published:
    """What the configuration says.

    Raises:
        CheckpointError: keys are missing, or it describes a drafter that helixctl cannot compute; names all of them.
    """
    if config.get("sample_from_anchor"):
        raise CheckpointError("this drafter cannot be used: it predicts at the anchor too", fix="use another drafter")
    if config.get("aux_hidden_state_layer_ids") is None:
        raise CheckpointError(
            "this drafter cannot be used: aux_hidden_state_layer_ids is missing", fix="see `helixctl export --check`"
        )
    target = verifier(config)
    return replace(
        zlab.read(flatten(config)),
        target=target.get("name_or_path"),
        target_architectures=tuple(target.get("architectures") or ()),
    )


def write(drafter: Published) -> dict[str, Any]:
    """``config.json`` that speculators and vLLM's reader of it understand.

    Raises:
        CheckpointError: the format has no key for what the target needs, or the target is not known.
    """
    if drafter.target is None:
        raise CheckpointError("the speculators format names the target, which is not known", fix="give --target MODEL")
    if unsaid(drafter):
        raise CheckpointError(
            f"the target {unsaid(drafter)}, which the speculators format cannot say", fix="use --format zlab"
        )
    greedy = {"proposal_type": "greedy", "speculative_tokens": drafter.block_size - 1}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "dtype": "bfloat16",
        "block_size": drafter.block_size,
        "draft_vocab_size": drafter.vocab_size,
        "target_hidden_size": None,
        "mask_token_id": drafter.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in drafter.taps],
        # vLLM sets the drafter's causality to the opposite of this, and takes true where it is missing.
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": {"model_type": "qwen3", **zlab.decoder_keys(drafter)},
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": drafter.target, "architectures": list(drafter.target_architectures)},
        },
    }


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same drafter in z-lab's keys, as vLLM's reader makes them."""
    layer = dict(config.get("transformer_layer_config") or {})
    ids = config.get("aux_hidden_state_layer_ids")
    section = {
        "block_size": config.get("block_size"),
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": None if ids is None else [i - 1 for i in ids],
        "causal": False,
    }
    kept = {key: config[key] for key in ("dtype", "draft_vocab_size") if key in config}
    return {**layer, **kept, zlab.SECTION: section}


def verifier(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the configuration says of the target."""
    return dict((config.get("speculators_config") or {}).get("verifier") or {})
