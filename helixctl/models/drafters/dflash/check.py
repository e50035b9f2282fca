"""Judges a published DFlash drafter, ours or not, from its configuration and the headers of its files.

Each rule is a real fault of some trainer or engine. What an engine does was read in its source: z-lab ``dflash`` 0.1.0,
``speculators`` 0.9.0 and ``specforge`` 0.2.0 were run too (``scripts/judge``); vLLM (git 3fd867d) and SGLang (git
00731f0) were not. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from helixctl.models.drafters._findings import EngineView, Finding, TensorInfo, judge
from helixctl.models.drafters.dflash.check_tensors import TENSOR_RULES
from helixctl.models.drafters.dflash.engines import USES
from helixctl.models.drafters.dflash.formats import speculators, zlab
from helixctl.models.drafters.dflash.published import served_positions
from helixctl.models.drafters.dflash.seen import SGLANG, SPECFORGE, SPECULATORS, VLLM, ZLAB, Seen
from helixctl.models.facts import TargetFacts
from helixctl.plugins import load_plugin

Rule = Callable[[Seen], Iterator[Finding]]


def check(
    format_name: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], target: TargetFacts | None
) -> tuple[tuple[Finding, ...], tuple[EngineView, ...]]:
    """Everything found, worst first, and what each engine would do.

    Args:
        format_name: Plug-in in ``formats``.
        config: The folder's config.json.
        tensors: The headers of its weight files.
        target: Facts of the target, where it is at hand: more can be checked then.
    """
    flat = load_plugin(f"{__package__}.formats", format_name).flatten(config)
    return judge(Seen(format_name, config, flat, tensors, target), RULES, USES)


def _architecture(seen: Seen) -> Iterator[Finding]:
    """Engines choose their class by this name; one of Automodel's own is not known to them."""
    if seen.format == "speculators":
        message = "the speculators format is not read"
        yield Finding("error", message, (ZLAB, SGLANG, SPECFORGE), "helixctl convert SRC DST --format zlab")
        return
    names = list(seen.raw.get("architectures") or ())
    if names != ["DFlashDraftModel"]:
        fix = 'write "architectures": ["DFlashDraftModel"]'
        yield Finding("error", f"architectures is {names}, which is not dispatched to DFlash", (VLLM, SGLANG), fix)
    if seen.flat.get("model_type") != "qwen3":
        yield Finding("warning", f"model_type is {seen.flat.get('model_type')!r}, not 'qwen3'", (ZLAB, VLLM, SGLANG))


def _sizes(seen: Seen) -> Iterator[Finding]:
    needed = (*zlab.NEEDED, "max_position_embeddings", "hidden_act", "head_dim")
    missing = [key for key in needed if seen.flat.get(key) is None]
    if missing:
        where = "transformer_layer_config" if seen.format == "speculators" else "config.json"
        message = f"{where} lacks {', '.join(missing)}; engines would fall back to defaults of another model"
        yield Finding("error", message, fix="write the sizes of the drafter")
    if seen.format == "zlab" and seen.value("num_target_layers") is None:
        message = "num_target_layers is missing; loading fails even where the taps are written"
        yield Finding("error", message, (ZLAB, SPECFORGE), "write the number of layers of the target")


def _block_size(seen: Seen) -> Iterator[Finding]:
    size, nested, top = seen.value("block_size"), seen.section.get("block_size"), seen.raw.get("block_size")
    if size is None:
        yield Finding(
            "error", "block_size is missing; z-lab's code would take 16", fix="write it at the top and nested"
        )
        return
    if int(size) < 2:
        yield Finding("error", f"block_size {size} drafts nothing")
    if seen.format == "zlab":
        if None not in (nested, top) and nested != top:
            yield Finding(
                "error", f"block_size is {top} at the top and {nested} in {zlab.SECTION}", fix="make them equal"
            )
        if top is None:
            message = f"block_size stands in {zlab.SECTION} only; readers of the top level miss it"
            yield Finding("error", message, (SPECFORGE,), "write it at the top too")
        return
    methods = (seen.raw.get("speculators_config") or {}).get("proposal_methods") or []
    counts = [method.get("speculative_tokens") for method in methods]
    if not counts or any(count != int(size) - 1 for count in counts):
        message = f"speculative_tokens is {counts or 'missing'}, and a block of {size} drafts {int(size) - 1}"
        yield Finding("error", message, (VLLM, SPECULATORS), f"write {int(size) - 1}: the anchor is not drafted")


def _mask_token(seen: Seen) -> Iterator[Finding]:
    mask, rows = seen.value("mask_token_id"), seen.flat.get("vocab_size")
    if mask is None:
        yield Finding("error", "mask_token_id is missing", fix=f"write it in {zlab.SECTION}")
        return
    if rows is not None and not 0 <= mask < rows:
        yield Finding("error", f"mask_token_id {mask} is no row of an embedding of {rows}")
    taken = [key for key in ("eos_token_id", "pad_token_id", "bos_token_id") if mask == seen.flat.get(key)]
    if taken:
        yield Finding("warning", f"mask_token_id {mask} is {' and '.join(taken)} too", fix="train with a free token")
    if seen.format == "zlab" and "mask_token_id" not in seen.section:
        yield Finding("error", f"mask_token_id stands outside {zlab.SECTION}", (SPECFORGE,), "write it there too")


def _taps(seen: Seen) -> Iterator[Finding]:
    taps, layers = zlab.taps_of(seen.flat), seen.num_target_layers
    if taps is None:
        yield Finding("error", "the tapped layers are not written, nor the number of target layers for the formula")
        return
    if seen.value("target_layer_ids") is None:
        yield Finding("note", f"the tapped layers are not written: the formula gives {list(taps)}")
    elif seen.format == "zlab" and "target_layer_ids" not in seen.section:
        yield Finding("error", f"target_layer_ids stands outside {zlab.SECTION}", (VLLM, SPECFORGE), "write it there")
    if len(set(taps)) < len(taps):
        yield Finding("error", f"the taps {list(taps)} repeat a layer")
    if min(taps, default=0) < 0:
        yield Finding("error", f"the taps {list(taps)} name the embedding's output, which is no layer")
    if layers is None:
        return
    if max(taps, default=0) >= layers:
        message = f"the taps {list(taps)} go beyond the target's layers 0 to {layers - 1}"
        yield Finding("error", message, fix="they may be counted from 1: subtract 1")
    yield from _convention(seen, taps, layers)


def _convention(seen: Seen, taps: tuple[int, ...], layers: int) -> Iterator[Finding]:
    """An offset of one costs a few per cent of acceptance and nothing else tells."""
    if len(taps) < 2 or layers < 5:
        return
    usual = zlab.formula(layers, len(taps))
    shift = 1 if seen.format == "zlab" else -1
    if taps == tuple(i + shift for i in usual):
        counted = "from 1, as vLLM's captures are" if shift == 1 else "from 0, as z-lab's are"
        message = f"the taps look as if they were counted {counted}: {list(taps)} is the usual {list(usual)} shifted"
        yield Finding("warning", message, fix="ask who trained it, or compare acceptance with both")
    if layers - 1 in taps:
        message = "the last layer is tapped: transformers' hidden states have it after the final norm only"
        yield Finding("warning", message, (ZLAB, SPECFORGE))
        if seen.format == "zlab":
            yield Finding("error", "its converter drops the tap of the last layer", (SPECULATORS,))


def _rope(seen: Seen) -> Iterator[Finding]:
    old, new = seen.flat.get("rope_theta"), (seen.flat.get("rope_parameters") or {}).get("rope_theta")
    if old is None and new is None:
        message = "rope_theta is written nowhere: vLLM would take 1000000, transformers 10000"
        yield Finding("error", message, fix="write the base it was trained with, at the top and in rope_parameters")
    elif old is not None and new is not None and float(old) != float(new):
        yield Finding("error", f"rope_theta is {old} at the top and {new} in rope_parameters", fix="make them equal")
    elif new is None:
        yield Finding("note", "rope_theta stands at the top only, which transformers 5 still reads")
    elif old is None:
        yield Finding(
            "warning", "rope_theta stands in rope_parameters only; stacks on transformers 4 take 10000 or 1000000"
        )
    if seen.flat.get("is_neox_style") is False:
        yield Finding("error", "is_neox_style is false: every implementation but vLLM's rotates halves")


def _causality(seen: Seen) -> Iterator[Finding]:
    kinds = list(seen.flat.get("layer_types") or ())
    sliding = kinds.count("sliding_attention")
    layers = seen.flat.get("num_hidden_layers")
    if kinds and layers is not None and len(kinds) != layers:
        yield Finding("error", f"layer_types has {len(kinds)} entries for {layers} layers")
    if sliding and not seen.flat.get("sliding_window"):
        yield Finding("error", "there are sliding layers and no sliding_window")
    if 0 < sliding < len(kinds):
        yield Finding("warning", "mixed sliding and full layers need VLLM_USE_V2_MODEL_RUNNER=1 or fail", (VLLM,))
    if seen.format == "speculators":
        if "sliding_window_non_causal" not in seen.raw:
            message = "sliding_window_non_causal is missing: the drafter would be run causally"
            yield Finding("error", message, (VLLM,), "write true for a drafter whose blocks see both ways")
    elif seen.section.get("causal") is None and seen.raw.get("is_causal") is None:
        said = "sliding layers are run causally, full ones both ways" if sliding else "blocks are run both ways"
        yield Finding("warning" if sliding else "note", f"causality is not written; {said}", fix="write it")


def _positions(seen: Seen) -> Iterator[Finding]:
    if seen.target is None:
        return
    longest, own = served_positions(seen.target), int(seen.flat.get("max_position_embeddings") or 0)
    if own < longest:
        message = f"max_position_embeddings is {own}, and the target is served with {longest}: drafting ends there"
        yield Finding("warning", message, (VLLM, SGLANG), f"write {longest}")


def _target(seen: Seen) -> Iterator[Finding]:
    if seen.target is None:
        return
    pairs: dict[str, Any] = {
        "hidden_size": seen.target.hidden_size,
        "vocab_size": seen.target.vocab_size,
        "num_target_layers": seen.target.num_layers,
    }
    for key, expected in pairs.items():
        said = seen.value(key)
        if said is not None and said != expected:
            yield Finding(
                "error", f"{key} is {said}, the target's is {expected}", fix="name the target it was trained for"
            )


def _scale(seen: Seen) -> Iterator[Finding]:
    """Gemma-like targets: the drafter's inputs and logits are the target's, scaled and capped."""
    known = seen.target is not None
    itself = seen.target is not None and seen.target.model_type.startswith("gemma")
    # The target's embedding module multiplies: transformers' does for Gemma, and not for Granite.
    if seen.target and seen.embedding_scale == 1.0 != seen.target.embedding_scale:
        message = f"the target scales its embeddings by {seen.target.embedding_scale:.4g}, the drafter gets raw ones"
        yield Finding("warning", message, fix="right for a drafter that was trained on raw embeddings only")
        if itself:
            yield Finding("error", "it calls the target's embedding module, which scales by itself", (SPECFORGE,))
            yield Finding("warning", "wrong if the target's embedding module scales by itself", (SGLANG,))
    elif seen.embedding_scale != 1.0:
        message = f"input_embedding_scale {seen.embedding_scale:.4g} is not read: the drafter gets raw embeddings"
        raw = (VLLM, SPECULATORS, SPECFORGE) if known and not itself else (VLLM, SPECULATORS)
        yield Finding("error", message, raw, "train with drafter.scale_embeddings: false")
        message = "input_embedding_scale is not read; right only if the target's embedding module scales by itself"
        yield Finding("warning", message, (SGLANG,) if known else (SGLANG, SPECFORGE))
    if seen.value("final_logit_softcapping"):
        message = "final_logit_softcapping is not read: greedy drafts are the same, sampled ones sharper"
        yield Finding("warning", message, (VLLM, SPECULATORS, SPECFORGE))


def _verifier(seen: Seen) -> Iterator[Finding]:
    if seen.format != "speculators":
        return
    name = speculators.verifier(seen.raw).get("name_or_path")
    if not name:
        message = "the target is not named: embedding and head cannot be found"
        yield Finding("error", message, (VLLM, SPECULATORS), "write speculators_config.verifier.name_or_path")
    elif str(name).startswith(("/", ".", "~")):
        yield Finding("warning", f"the target is named by a folder of one machine: {name}", (VLLM, SPECULATORS))
    if not speculators.verifier(seen.raw).get("architectures"):
        yield Finding("note", "the target's architectures are not written", (SPECULATORS,))


def _foreign_parts(seen: Seen) -> Iterator[Finding]:
    """Parts that helixctl does not compute; engines may."""
    for part in zlab.unsupported(seen.flat):
        yield Finding("note", f"helixctl cannot run or train it: {part}")


LAYER_RULES: tuple[Rule, ...] = (_sizes, _mask_token, _taps, _rope, _positions, _target)
"""Those that hold for whatever predicts with these layers."""
RULES: tuple[Rule, ...] = (
    _architecture,
    *LAYER_RULES,
    _block_size,
    _causality,
    _scale,
    _verifier,
    _foreign_parts,
    *TENSOR_RULES,
)
