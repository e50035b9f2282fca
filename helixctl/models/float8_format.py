"""Whether a target's products are done in float8, and how a checkpoint that is float8 already is stored.

Decided from recipe and config.json alone; ``float8.py`` does it. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from helixctl.errors import ModelError
from helixctl.models.facts import TargetFacts, layer_outputs, layer_parameters
from helixctl.recipe.schema import TargetOptions

_BF16 = "name the bfloat16 checkpoint that it was made from, with target.quantization: fp8 if float8 is served"
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Float8:
    """Both factors of a product are float8 e4m3: weights with fixed scales, activations with scales found anew."""

    block: int | None = None
    """None: one scale per output row and one per token. b: one per b x b weights and one per b values of a token."""
    stored: str = ""
    """Name that the checkpoint's scales end in; empty where its weights are to be quantised."""

    def __str__(self) -> str:
        scales = "a scale per output row and token" if self.block is None else f"scales of blocks of {self.block}"
        return f"float8 e4m3, {scales}"


def choose_float8(options: TargetOptions, facts: TargetFacts) -> Float8 | None:
    """How the products of the target's layers are done; None: in its dtype.

    Raises:
        ModelError: a float8 checkpoint of a kind that cannot be reproduced, or a target whose layers cannot be float8.
    """
    stored = stored_float8(facts.raw)
    if stored is None and options.quantization != "fp8":
        return None
    if stored is None and (method := _section(facts.raw).get("quant_method")):
        message = f"{options.model} is quantised already ({method}): target.quantization: fp8 would do so again"
        raise ModelError(message, fix="leave target.quantization at auto, or name the checkpoint that it was made from")
    what = "experts" if facts.num_experts else "recurrent layers" if facts.recurrent else ""
    if what:
        fix = "name the bfloat16 checkpoint and set target.quantization: none; features then differ from what is served"
        raise ModelError(f"{options.model} has {what}, whose products helixctl does not do in float8", fix=fix)
    return None if options.quantization == "none" else stored or Float8()


def stored_float8(raw: Mapping[str, Any]) -> Float8 | None:
    """How the checkpoint with the config.json ``raw`` is stored; None where its weights are not float8.

    Raises:
        ModelError: float8 of a kind whose numbers helixctl does not reproduce; says what of it.
    """
    section = _section(raw)
    method = section.get("quant_method")
    if method == "fp8":
        problems, block, ending = _fp8_problems(section), section.get("weight_block_size"), "weight_scale_inv"
    elif method == "compressed-tensors" and section.get("format") in ("float-quantized", "naive-quantized"):
        groups = [*(section.get("config_groups") or {}).values()]
        weights = (groups or [{}])[0].get("weights") or {}
        problems, block, ending = _group_problems(section, groups), weights.get("block_structure"), "weight_scale"
    else:
        return None
    if found := "; ".join(problems):
        raise ModelError(f"a float8 checkpoint of a kind that is not reproduced: {found}", fix=_BF16)
    return Float8(_square(block), ending)


def float8_warnings(options: TargetOptions, facts: TargetFacts, float8: Float8 | None) -> Iterator[str]:
    """What a plan says of a target whose features are not those of what its checkpoint is served as."""
    if float8 is None and (stored := stored_float8(facts.raw)) is not None:
        yield (
            f"{options.model} is stored as {stored}, and the recipe trains on features of full-precision products, "
            "which its server does not compute: take target.quantization away"
        )
    if float8 is not None and options.dtype == "float16":
        yield "target.dtype is float16, in which no device multiplies float8: use bfloat16"


def weight_bytes(facts: TargetFacts, element_bytes: int, float8: Float8 | None) -> int:
    """Of a decoder's layers: 1 byte a weight and 4 a scale, or ``element_bytes`` a weight."""
    weights = layer_parameters(facts)
    if float8 is None:
        return facts.num_layers * weights * element_bytes
    num_scales = layer_outputs(facts) if float8.block is None else weights // float8.block**2
    return facts.num_layers * (weights + _SCALE_BYTES * num_scales)


def _section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    section = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config") or {}
    return section if isinstance(section, Mapping) else {}


def _square(shape: Any) -> int | None:
    """The side of a square block."""
    sides = {*shape} if isinstance(shape, list | tuple) else set()
    return int(sides.pop()) if len(sides) == 1 else None


def _fp8_problems(section: Mapping[str, Any]) -> Iterator[str]:
    if section.get("activation_scheme", "dynamic") != "dynamic":
        yield f"activation_scheme is {section['activation_scheme']}, known is dynamic"
    if _square(section.get("weight_block_size")) is None:
        yield f"weight_block_size is {section.get('weight_block_size')}, known are square blocks such as [128, 128]"
    if section.get("scale_fmt") not in (None, "float"):
        yield f"scale_fmt is {section['scale_fmt']}, known is float"


def _group_problems(section: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> Iterator[str]:
    if section.get("kv_cache_scheme"):
        yield "kv_cache_scheme quantises keys and values too"
    if len(groups) != 1:
        yield f"it has {len(groups)} config_groups, known is one"
    for group in groups:
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        for name, part in (("weights", weights), ("input_activations", inputs)):
            if (part.get("type"), part.get("num_bits"), part.get("symmetric", True)) != ("float", 8, True):
                yield f"its {name} are not symmetric float8"
        how = f"{weights.get('strategy')} and {inputs.get('strategy')}"
        if how not in ("channel and token", "block and group"):
            yield f"its scales are per {how}, known are channel and token"
        elif how == "block and group" and _square(weights.get("block_structure")) != inputs.get("group_size"):
            yield f"its blocks are {weights.get('block_structure')} and its groups {inputs.get('group_size')}"
        if not inputs.get("dynamic"):
            yield "its activations have fixed scales"
