"""From a name or folder to a frozen model that keeps packed documents apart, or a ModelError that says why not.

All that depends on how transformers lays out a model stands here and in ``attention.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from helixctl.errors import ModelError
from helixctl.models import attention
from helixctl.models.facts import TargetFacts
from helixctl.models.float8 import quantize_layers, restore_layers
from helixctl.models.float8_format import Float8, stored_float8
from helixctl.models.quiet import expecting, silence_transformers
from helixctl.models.shared import SharedWeights
from helixctl.models.spread import spread
from helixctl.recipe.schema import TargetOptions

MASKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of attention layers (``layer_types``) whose visibility our rules reproduce."""

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "embedding_norm")
"""Where decoders keep the norm before the head; the last is LFM2's name for it. ``proof.py`` checks the choice."""


def choose_backend(options: TargetOptions, facts: TargetFacts, device: torch.device) -> attention.Backend:
    """The attention backend for ``device``: segments on a CPU, flex on a GPU, unless the recipe says otherwise.

    With ``compile: on`` it is flex on a CPU, too.

    Raises:
        ModelError: flex without compilation, or layers whose masks we do not have.
    """
    text = facts.raw.get("text_config") or facts.raw
    unknown = sorted(set(text.get("layer_types") or ()) - MASKED_LAYERS)
    if unknown and not facts.recurrent:
        raise ModelError(
            f"{options.model} has layers of type {', '.join(unknown)}, whose attention helixctl does not reproduce",
            fix="use a target with full and sliding attention only",
        )
    on_cpu = device.type == "cpu" and options.compile != "on"
    if options.attention == "flex" and on_cpu:
        raise ModelError("target.attention: flex needs a GPU", fix="use segments on a CPU, or compile.mode: on")
    if options.attention == "flex" and options.compile == "off":
        raise ModelError("target.attention: flex must be compiled", fix="leave target.compile at auto, or use segments")
    if options.attention != "auto":
        return options.attention
    return "segments" if on_cpu or options.compile == "off" else "flex"


def load_model(options: TargetOptions, facts: TargetFacts, dtype: torch.dtype) -> Any:
    """The causal LM on the CPU (its files are mapped, not read twice), frozen, in eval mode.

    Float8 weights come without their scales; ``set_products`` brings them.

    Raises:
        ModelError: see ``Target.load``.
    """
    import transformers

    attention.register()
    silence_transformers()
    ours = not facts.recurrent
    stored = stored_float8(facts.raw)
    try:
        with nullcontext() if stored is None else expecting(stored.stored):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                options.model,
                **({} if stored is None else _without_quantizer(options)),
                dtype=dtype,
                attn_implementation=attention.IMPLEMENTATION if ours else "sdpa",
                trust_remote_code=options.trust_remote_code,
                use_safetensors=True,
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"cannot load target {options.model}: {error}", fix=_fix(options)) from error
    except (RuntimeError, SafetensorError) as error:  # of other sizes than config.json says, or cut off
        fix = "download the weights again"
        raise ModelError(f"cannot load the weights of target {options.model}: {error}", fix=fix) from error
    if ours and not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{type(model).__name__} has attention code of its own, which cannot keep packed documents apart",
            fix="use a target whose attention goes through transformers' attention functions",
        )
    return model.eval().requires_grad_(False)


def _without_quantizer(options: TargetOptions) -> dict[str, Any]:
    """Arguments with which the library takes float8 weights as bare numbers.

    Its quantiser of `fp8` makes bfloat16 of them without a GPU, and fetches kernels from the hub with one; that of
    `compressed-tensors` needs a package, and multiplies in bfloat16 unless asked.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    for section in (config, config.get_text_config()):
        section.__dict__.pop("quantization_config", None)
    return {"config": config}


def set_products(model: Any, options: TargetOptions, facts: TargetFacts, float8: Float8 | None) -> None:
    """Let the layers of ``model``, as ``load_model`` gave it, multiply as ``choose_float8`` says.

    Raises:
        ModelError: scales that do not fit the weights.
    """
    decoder, stored = find_decoder(model, facts.num_layers), stored_float8(facts.raw)
    if stored is not None:
        restore_layers(model, decoder, options.model, stored, plain=float8 is None)
    elif float8 is not None:
        quantize_layers(decoder, float8)


def _fix(options: TargetOptions) -> str:
    if any(Path(options.model).glob("*.bin")):
        return "its weights are pickles, which can run code and are not loaded: save them as safetensors first"
    if Path(options.model).exists():
        code = "" if options.trust_remote_code else "; if it brings its own code, target.trust_remote_code: true"
        return f"the folder must hold config.json and weights of an architecture that transformers knows{code}"
    return "give the folder of a checkpoint, or a hub name that can be reached from here"


def spread_backend(options: TargetOptions) -> attention.Backend:
    """The attention backend of a target over several devices.

    Raises:
        ModelError: the recipe wants one whose masks or compiled code stand on one device.
    """
    if options.attention not in ("auto", "segments"):
        text = f"target.attention: {options.attention} runs on one device, and this target stands on several"
        raise ModelError(text, fix="leave target.attention at auto")
    return "segments"


def spread_model(model: Any, facts: TargetFacts, devices: Sequence[torch.device]) -> None:
    """Put ``model`` on ``devices``, layers in order, final norm and head on the last.

    Raises:
        ModelError: fewer layers than devices, or an architecture that is not laid out as expected.
    """
    decoder, head = find_decoder(model, facts.num_layers), model.get_output_embeddings()
    norms = [getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)]
    try:
        spread(model, decoder, [*norms[:1], *([head] if head is not None else [])], devices)
    except ValueError as error:
        raise ModelError(f"target: {error}", fix="name fewer devices in pipeline.targets") from error


def find_decoder(model: Any, num_layers: int) -> Any:
    """The module that holds the text decoder's ``layers``, wherever the architecture keeps it.

    Raises:
        ModelError: there is none with ``num_layers`` layers; the message says which lists of layers exist.
    """
    candidates = [model.get_decoder(), *model.modules()]
    for module in candidates:
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers and hasattr(module, "config"):
            return module
    lists = [f"{name} ({len(m)})" for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    found = ", ".join(lists) or "none"
    raise ModelError(
        f"{type(model).__name__} has no decoder with a list `layers` of {num_layers}; it has {found}",
        fix="use a target laid out like Llama, Qwen, Gemma, Mistral or Phi",
    )


def shared_weights(model: Any, decoder: Any, facts: TargetFacts) -> SharedWeights:
    """Embedding, head and final norm of ``model``, by reference.

    Raises:
        ModelError: the architecture turns states into logits, or ids into inputs, in a way that drafters do not know.
    """
    norms = [name for name in FINAL_NORMS if hasattr(decoder, name)]
    head = model.get_output_embeddings()
    if not norms or head is None:
        raise ModelError(
            f"{type(model).__name__} has no {'head' if norms else 'final norm'} where it was expected",
            fix="use a target laid out like Llama, Qwen, Gemma, Mistral or Phi",
        )
    embedding = model.get_input_embeddings().weight
    return SharedWeights(
        embedding=embedding,
        head=head.weight,
        head_bias=getattr(head, "bias", None),
        embedding_scale=embedding_scale(decoder, embedding, facts),
        logit_softcap=facts.logit_softcap,
        final_norm=getattr(decoder, norms[0]),
    )


class _FirstInput(Exception):
    """Carries the input of layer 0 out of a forward."""


@torch.no_grad()
def embedding_scale(decoder: Any, embedding: Tensor, facts: TargetFacts) -> float:
    """Input of layer 0 over the embedding's row, measured: some models scale in the embedding, some in the decoder.

    Raises:
        ModelError: the input is no multiple of the row (learned positions, a norm after the embedding).
    """

    def stop(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _FirstInput(args[0] if args else kwargs["hidden_states"])

    ids = torch.arange(3, min(19, embedding.shape[0]), device=embedding.device)[None]
    handle = decoder.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        decoder(input_ids=ids, use_cache=False)
    except _FirstInput as caught:
        given = caught.args[0][0].double()
    finally:
        handle.remove()
    rows = embedding[ids[0]].double()
    measured = float((rows * given).sum() / rows.square().sum())
    if not torch.allclose(rows * measured, given, rtol=2e-2, atol=1e-3 * float(given.abs().max())):
        raise ModelError(
            f"the inputs of {type(decoder).__name__}'s first layer are no multiple of its embedding",
            fix="use another target; drafters cannot share this embedding",
        )
    # The models round their scale to the weights' dtype.
    wanted = embedding.new_tensor([1.0, facts.embedding_scale, facts.hidden_size**0.5]).double()
    known = (float(scale) for scale in wanted)
    return next((scale for scale in known if abs(measured - scale) < 1e-3 * scale), measured)
