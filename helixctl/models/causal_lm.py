"""A causal LM that is trained: any of transformers, on packed rows whose documents never see each other.

The library's decoder runs with our attention (``attention.py``); its head is ours (``trained_head.py``), so that full
logits never exist. Nothing here knows an architecture. Dropout is off: a step is a function of its batch.

Legend: R rows, S tokens per row, H width, V vocabulary.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from helixctl.data.batch import SlotBatch
from helixctl.errors import ModelError
from helixctl.models import attention
from helixctl.models.drafters._terms import LossTerms
from helixctl.models.facts import TargetFacts
from helixctl.models.flex import FlexPacking, make_flex
from helixctl.models.private import compile_fixed, private
from helixctl.models.quiet import silence_transformers
from helixctl.models.trained_head import trained_head_loss
from helixctl.recipe.causal_lm import ModelOptions


def build_causal_lm(options: ModelOptions, seed: int) -> Any:
    """The model in float32 on the CPU, in eval mode, with our attention where it can have it.

    Args:
        options: A configuration, or a checkpoint whose weights it begins with.
        seed: Of the random weights of a new model; the caller's generators are left alone.

    Raises:
        ModelError: no such checkpoint, or a configuration that transformers does not know.
    """
    import transformers

    attention.register()
    silence_transformers()
    where = options.checkpoint or "model.config"
    try:
        config = _read_config(options)
        ours = _takes_our_attention(config, options)
        how = {"dtype": torch.float32, "trust_remote_code": options.trust_remote_code}
        if ours:
            how["attn_implementation"] = attention.IMPLEMENTATION
        if options.checkpoint is not None:
            how |= {"trust_remote_code": options.trust_remote_code, "use_safetensors": True}  # no pickles
            model = transformers.AutoModelForCausalLM.from_pretrained(options.checkpoint, config=config, **how)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = transformers.AutoModelForCausalLM.from_config(config, **how)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        fix = "name a causal LM that this version of transformers knows"
        raise ModelError(f"cannot build the model of {where}: {error}", fix=fix) from error
    return model.float().eval()


def _read_config(options: ModelOptions) -> Any:
    from transformers import AutoConfig

    if isinstance(options.config, dict):
        return AutoConfig.for_model(**options.config)
    place = options.config if options.config is not None else options.checkpoint
    return AutoConfig.from_pretrained(str(place), trust_remote_code=options.trust_remote_code)


def _takes_our_attention(config: Any, options: ModelOptions) -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return known and bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_attention_backend", False))


def choose_backend(options: ModelOptions, device: torch.device, *, compiled: bool) -> attention.Backend:
    """How documents are kept apart: segments on a CPU and in what is not compiled, else flex, unless the recipe says.

    Raises:
        ModelError: flex on a CPU, or without compilation.
    """
    if options.attention == "flex" and not compiled:
        raise ModelError("model.attention: flex needs a GPU and compiled layers", fix="use auto, or compile.mode: auto")
    if options.attention != "auto":
        return options.attention
    return "flex" if compiled else "segments"


class CausalLM:
    """A model of ``build_causal_lm`` on its device, as the training loop sees it. For one thread."""

    capturable = False
    """What a step launches depends on its documents."""

    def __init__(self, model: Any, facts: TargetFacts, options: ModelOptions, *, compiled: bool) -> None:
        """``compiled``: the decoder layers are, one graph for all of a kind, where they have our attention.

        Raises:
            ModelError: the decoder is not laid out as we know it.
        """
        self.module: nn.Module = model
        self.facts = facts
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.masks_documents = model.config._attn_implementation == attention.IMPLEMENTATION
        """Off: the attention is the library's, and a row may hold one document only."""
        compiled = compiled and self.masks_documents
        self._decoder: Any = model.base_model
        self._head: Any = model.get_output_embeddings()
        self._backend = choose_backend(options, self.device, compiled=compiled)
        self._flex = make_flex(compiled=True) if self._backend == "flex" else None
        self._compiled = _compile_layers(_layers_of(model, facts.num_layers)) if compiled else {}
        self._windows = self._look_at_layers() if self.masks_documents else set()

    def loss(self, slot: SlotBatch) -> LossTerms:
        """Summed cross-entropy of the supervised tokens, each given what precedes it in its document."""
        numerator, denominator, sums = self._score(slot)
        return LossTerms(numerator, denominator, sums)

    def evaluate(self, slot: SlotBatch) -> dict[str, Tensor]:
        """The same as sums: loss_num, loss_den, correct, count."""
        numerator, denominator, sums = self._score(slot)
        return {"loss_num": numerator, "loss_den": denominator, **sums}

    def _score(self, slot: SlotBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        labels, weights = next_tokens(slot)
        hidden = self.hidden(slot)
        numerator, right = trained_head_loss(
            hidden.flatten(0, 1),
            self._head.weight,
            getattr(self._head, "bias", None),
            self.facts.logit_softcap,
            labels.flatten(),
            weights.flatten(),
        )
        denominator = weights.sum()
        return numerator, denominator, {"correct": (right * weights.flatten()).sum(), "count": denominator}

    def hidden(self, slot: SlotBatch) -> Tensor:
        """States after the final norm, [R, S, H]. Values at padding mean nothing."""
        with self._attending(slot), self._running_compiled():
            found = self._decoder(input_ids=slot.input_ids, position_ids=slot.position_ids, use_cache=False)
        states: Tensor = found.last_hidden_state
        return states

    @contextmanager
    def _attending(self, slot: SlotBatch) -> Iterator[None]:
        assert slot.batch is not None, "an empty slot"
        rows = slice(slot.first_row, slot.first_row + len(slot.input_ids))  # the slot may be a part of a larger one
        spans = slot.batch.spans[rows]
        if not self.masks_documents:
            assert all(len(documents) <= 1 for documents in spans), "one document per row, see check_packing"
            yield
            return
        rule: attention.Rule
        if self._flex is not None:
            rule = FlexPacking(self._flex, slot.document_ids, slot.document_ids)  # the host is not asked
            rule.make_masks(self._windows)
        elif self._backend == "dense":
            rule = attention.DensePacking(slot.document_ids)
        else:
            rule = attention.SegmentPacking(spans)
        with attention.attending(rule):
            yield

    @contextmanager
    def _running_compiled(self) -> Iterator[None]:
        """Decoding goes through the layers as transformers made them, so they are put back."""
        for layer, forward in self._compiled.items():
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._compiled:
                del layer.forward

    @torch.no_grad()
    def _look_at_layers(self) -> set[int | None]:
        """The windows that the layers attend through.

        Raises:
            ModelError: layers that bypass our attention, in which documents of one row could see each other.
        """
        probe = attention.Probe()
        ids = torch.zeros((1, 4), dtype=torch.int64, device=self.device)
        with attention.attending(probe):
            self._decoder(input_ids=ids, position_ids=torch.arange(4, device=self.device)[None], use_cache=False)
        if probe.num_calls != self.facts.num_layers:
            raise ModelError(
                f"{probe.num_calls} of {self.facts.num_layers} layers of {type(self._decoder).__name__} use our "
                "attention; in the others documents of one row could see each other",
                fix="set data.packing: document",
            )
        return probe.windows


def next_tokens(slot: SlotBatch) -> tuple[Tensor, Tensor]:
    """Labels int64 [R, S] and weights float32 [R, S]: 1 where the next token is supervised and of the same document."""
    together = (slot.document_ids[:, 1:] == slot.document_ids[:, :-1]) & (slot.document_ids[:, 1:] >= 0)
    weights = pad((together & slot.loss_mask[:, 1:]).float(), (0, 1))  # [R, S]
    return slot.input_ids.roll(-1, dims=1), weights


def check_packing(model: Any, packing: str) -> None:
    """Refuse packed rows where documents could see each other.

    Raises:
        ModelError: the architecture brings attention of its own.
    """
    if packing == "continuous" and model.config._attn_implementation != attention.IMPLEMENTATION:
        raise ModelError(
            f"{type(model).__name__} has attention code of its own, which cannot keep packed documents apart",
            fix="set data.packing: document",
        )


def _layers_of(model: Any, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers, wherever the architecture keeps it.

    Raises:
        ModelError: there is none with ``num_layers`` layers.
    """
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    fix = "set compile.mode: off"
    raise ModelError(f"{type(model).__name__} has no list of {num_layers} layers that could be compiled", fix=fix)


def _compile_layers(layers: nn.ModuleList) -> dict[Any, Any]:
    """Layer -> its compiled forward; layers of one kind share a graph, as they share a code object."""
    forwards = {kind: private(kind.forward) for kind in {type(layer) for layer in layers}}
    return {layer: compile_fixed(types.MethodType(forwards[type(layer)], layer)) for layer in layers}
