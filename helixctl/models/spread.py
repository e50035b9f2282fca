"""One model over several devices: its layers stand on them in order, and what flows between them is carried over.

For a target that does not fit one GPU. Nothing is computed twice and nothing waits on the host; while one device works
the others rest, unless several loops use the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from helixctl.models.attention import Rule
from helixctl.models.scores import Scores


def split_layers(sizes: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Which part each of the layers belongs to: contiguous, none empty, the largest part as small as it can be.

    Args:
        sizes: Of every layer, in order.
        num_parts: Of which each gets one layer at least.

    Raises:
        ValueError: fewer layers than parts.
    """
    if not 1 <= num_parts <= len(sizes):
        raise ValueError(f"{len(sizes)} layers cannot stand on {num_parts} devices")
    low, high = max(sizes), sum(sizes)
    while low < high:  # the smallest limit with which that many parts suffice
        limit = (low + high) // 2
        low, high = (low, limit) if _count_parts(sizes, limit) <= num_parts else (limit + 1, high)
    parts, held, part = [], 0, 0
    for place, size in enumerate(sizes):
        must_leave = len(sizes) - place == num_parts - 1 - part  # a layer for each part that is left
        if place and part < num_parts - 1 and (held + size > low or must_leave):
            part, held = part + 1, 0
        parts.append(part)
        held += size
    return tuple(parts)


def _count_parts(sizes: Sequence[int], limit: int) -> int:
    parts, held = 1, 0
    for size in sizes:
        if held + size > limit:
            parts, held = parts + 1, 0
        held += size
    return parts


def spread(model: Any, decoder: Any, ends: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Put the decoder's ``layers`` on ``devices`` in order; what comes before them on the first, ``ends`` on the last.

    Args:
        model: frozen; moved in place, piece by piece, so that no device ever holds all of it.
        decoder: the part of ``model`` that holds ``layers`` and is called with ids and positions.
        ends: what comes behind the layers: final norm and head. A head that is tied to the embedding gets its own copy.
        devices: as many as there are layers at most.
    """
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in decoder.layers]
    parts = split_layers(sizes, len(devices))
    place = {module: devices[-1] for end in ends for module in end.modules()}
    for layer, part in zip(decoder.layers, parts, strict=True):
        place |= dict.fromkeys(layer.modules(), devices[part])
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in seen:  # tied: it may have to stand on two devices
                setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=False))
            seen.add(id(parameter))
    for module in model.modules():
        device = place.get(module, devices[0])
        module._apply(lambda tensor, to=device: tensor.to(to), recurse=False)
    decoder.register_forward_pre_hook(carrier(devices[0]), with_kwargs=True)
    for before, after, layer in zip(parts, parts[1:], decoder.layers[1:], strict=False):
        if after or before:
            layer.register_forward_pre_hook(carrier(devices[after]), with_kwargs=True)


def carrier(device: torch.device) -> Callable[..., tuple[Any, Any]]:
    """A pre-hook that brings every tensor among a module's arguments to ``device``."""

    def carry(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _carried(args, device), {name: _carried(value, device) for name, value in kwargs.items()}

    return carry


def _carried(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if type(value) in (tuple, list):  # rotary tables; caches and others know themselves where their parts are
        return type(value)(_carried(part, device) for part in value)
    return value


class RuleByDevice:
    """An attention rule whose masks stand on every device that asks."""

    def __init__(self, make: Callable[[torch.device], Rule]) -> None:
        self._make = make
        self._rules: dict[torch.device, Rule] = {}
        self.num_calls = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See ``Rule``."""
        if query.device not in self._rules:
            self._rules[query.device] = self._make(query.device)
        return self._rules[query.device].attend(query, key, value, scores)
