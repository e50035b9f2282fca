"""What each engine would use of a published DFlash drafter, in its own words and counting. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable

from helixctl.models.drafters.dflash.formats import zlab
from helixctl.models.drafters.dflash.seen import SGLANG, SPECFORGE, SPECULATORS, VLLM, ZLAB, Seen


def _zlab(seen: Seen) -> dict[str, str]:
    return {
        "block": f"{_size(seen)} tokens, {_size(seen) - 1} of them drafted",
        "captures": f"hidden_states[{', '.join(str(i + 1) for i in _taps(seen))}]",
        **_common(seen),
        "embeddings x": f"{seen.embedding_scale:.6g}",
        "logits": f"capped at {seen.value('final_logit_softcapping')}" if _softcap(seen) else "as the head gives them",
    }


def _vllm(seen: Seen) -> dict[str, str]:
    source = "from the file" if seen.format == "speculators" else "on the command line"
    return {
        "num_speculative_tokens": f"{_size(seen) - 1}, {source}",
        "captures": f"after {', '.join(str(i + 1) for i in _taps(seen))} layers",
        **_common(seen),
        "longest context": f"{seen.flat.get('max_position_embeddings')} tokens",
    }


def _sglang(seen: Seen) -> dict[str, str]:
    return {
        "speculative-num-draft-tokens": f"{_size(seen)}, the anchor included",
        "captures": f"before layers {', '.join(str(i + 1) for i in _taps(seen))}",
        **_common(seen),
    }


def _speculators(seen: Seen) -> dict[str, str]:
    return {
        "speculative_tokens": str(_size(seen) - 1),
        "aux_hidden_state_layer_ids": ", ".join(str(i + 1) for i in _taps(seen)),
        **_common(seen),
        "loads": "as it is" if seen.format == "speculators" else "after its own conversion, which needs the target",
    }


def _specforge(seen: Seen) -> dict[str, str]:
    return {
        "block": f"{_size(seen)} tokens",
        "captures": f"hidden_states[{', '.join(str(i + 1) for i in _taps(seen))}]",
        **_common(seen),
    }


def _common(seen: Seen) -> dict[str, str]:
    causal = seen.value("causal") or seen.flat.get("is_causal")
    return {
        "mask token": str(seen.value("mask_token_id")),
        "rope base": f"{float(zlab.rope(seen.flat)['rope_theta']):g}",
        "block attention": "causal" if causal else "both ways",
    }


def _softcap(seen: Seen) -> bool:
    return bool(seen.value("final_logit_softcapping"))


def _size(seen: Seen) -> int:
    return int(seen.value("block_size"))


def _taps(seen: Seen) -> tuple[int, ...]:
    return zlab.taps_of(seen.flat) or ()


USES: dict[str, Callable[[Seen], dict[str, str]]] = {
    ZLAB: _zlab,
    VLLM: _vllm,
    SGLANG: _sglang,
    SPECULATORS: _speculators,
    SPECFORGE: _specforge,
}
"""By engine."""
