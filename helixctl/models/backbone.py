"""The part of a target that features need: its layers up to the last tap, compiled one by one, without the final norm.

A backbone is a second set of module objects around the same weights. Decoding and validation go through the target's
own modules, which stay as transformers made them. All layers of one kind share one compiled graph.

Legend: R rows, S tokens per row, K taps, H target width.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from helixctl.models.loading import FINAL_NORMS
from helixctl.models.private import compile_fixed, private


class Backbone:
    """Calls the decoder of a target up to its last tap. For one thread at a time."""

    def __init__(self, decoder: Any, taps: Sequence[int]) -> None:
        """``decoder`` has ``layers`` and a ``forward`` in transformers' way; it is not changed."""
        self.name = type(decoder).__name__
        self._taps = tuple(taps)
        self._states: dict[int, Tensor] = {}
        self._layers = [_twin(layer) for layer in decoder.layers[: max(taps) + 1]]
        for index in self._taps:
            self._layers[index].register_forward_hook(self._keep(index))
        self._decoder = _twin(decoder)
        self._decoder.layers = nn.ModuleList(self._layers)
        for name, child in decoder.named_children():
            if name in FINAL_NORMS:
                setattr(self._decoder, name, nn.Identity() if isinstance(child, nn.Module) else child)

    def compile(self, **options: Any) -> None:
        """Compile the layers, each at its first call.

        Args:
            options: For ``torch.compile``; by default whole graphs of fixed shapes.
        """
        own = {kind: private(kind.forward) for kind in {type(layer) for layer in self._layers}}
        for layer in self._layers:
            forward = types.MethodType(own[type(layer)], layer)  # one code object, so one graph, for all of a kind
            layer.forward = compile_fixed(forward, **options)

    def interpret(self) -> None:
        """Undo ``compile``."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor) -> list[Tensor]:
        """K tensors [R, S, H] for ids and positions [R, S] on the decoder's device; set an attention rule around it."""
        try:
            self._decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
            return [self._states[tap] for tap in self._taps]
        finally:
            self._states = {}

    def _keep(self, index: int) -> Any:
        def keep(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            self._states[index] = output[0] if isinstance(output, tuple) else output

        return keep


def _twin(module: Any) -> Any:
    """A module object of the same class with the same parameters and children, but hooks and attributes of its own."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        setattr(twin, name, type(getattr(module, name))())
    return twin
