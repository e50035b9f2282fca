"""The target's attention: packed documents never see each other, and decoding rows stand at their own positions.

One function is registered in transformers under ``IMPLEMENTATION``; what it may see is a *rule*, set for the calling
thread around a forward (``attending``). No mask function is registered, so the library's mask builder returns at once
(it would synchronise with the device when it sees restarting positions). Nothing here knows a model class.

Legend: R rows, S tokens per row, T new tokens per row, L cached tokens, N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from helixctl.data.batch import MicroBatch
from helixctl.decoding.policy import Branches
from helixctl.errors import ModelError
from helixctl.models.flex import FlexCall, FlexPacking
from helixctl.models.scores import Scores, as_bias, masked_attention, product_attention, visible

IMPLEMENTATION = "helixctl_packed"
"""Our name in transformers' table of attention functions."""

Backend = Literal["segments", "flex", "dense"]

SHORT = 256
"""Documents up to so many tokens are attended by plain matrix products on a CPU."""

FEW_QUERIES = 128
"""Decoding steps with up to so many queries per key head (a block, not a prompt) are attended the same way."""


class Rule(Protocol):
    """What may see what, for all layers of one forward."""

    num_calls: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[R, N, S, D], [R, G, S, D], [R, G, S, Dv] -> [R, S, N, Dv]."""
        ...


_active = threading.local()


@contextmanager
def attending(rule: Rule) -> Iterator[None]:
    """Forwards of this thread attend by ``rule``; other threads are not touched."""
    previous = getattr(_active, "rule", None)
    _active.rule = rule
    try:
        yield
    finally:
        _active.rule = previous


def register() -> None:
    """Make ``IMPLEMENTATION`` known to transformers. Registering twice is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer: [R, N, S, D] queries -> ([R, S, N, Dv], None).

    Raises:
        ModelError: the layer asks for something the rule cannot honour.
    """
    rule: Rule | None = getattr(_active, "rule", None)
    assert rule is not None, f"{IMPLEMENTATION} outside of attending()"
    if attention_mask is not None or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
        raise ModelError(
            f"{type(module).__name__} brings a mask, a position bias or bidirectional attention of its own",
            fix="use another target: documents packed in one row could see each other here",
        )
    if not torch.compiler.is_dynamo_compiling():  # a changing number would be guarded, and every layer compiled anew
        rule.num_calls += 1
    if query.dtype != value.dtype:  # under autocast, as rotary tables are float32
        query, key = query.to(value.dtype), key.to(value.dtype)
    return rule.attend(query, key, value, _scores(module, query, kwargs)), None


def _scores(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> Scores:
    scale = kwargs.get("scaling")
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
    return Scores(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )


def make_packing(backend: Backend, batch: MicroBatch, device: torch.device, flex: FlexCall | None = None) -> Rule:
    """The rule for the documents of ``batch``: causal within each, nothing between (``flex``: of ``make_flex``)."""
    if backend == "segments":
        return SegmentPacking(batch.spans)
    document_ids = batch.document_ids.to(device, non_blocking=True)
    if backend == "dense":
        return DensePacking(document_ids)
    assert flex is not None
    return FlexPacking(flex, batch.document_ids, document_ids)


class Probe:
    """Attends to nothing and keeps what the layers ask for: how many there are, and with which windows."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.windows: set[int | None] = set()

    def attend(self, query: Tensor, _key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See ``Rule``; zeros."""
        self.windows.add(scores.window)
        rows, heads, tokens = query.shape[:3]
        return value.new_zeros(rows, tokens, heads, value.shape[-1])


class SegmentPacking:
    """One call per document, rows whose document has the same place together. Padding gets zeros.

    The fast way on a CPU: work grows with the sum of squared document lengths, and no mask exists unless a document
    is longer than the window.
    """

    def __init__(self, spans: tuple[tuple[tuple[int, int], ...], ...]) -> None:
        self.num_calls = 0
        self._groups = _same_place(spans)
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._biases: dict[tuple[int, int | None, int], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See ``Rule``."""
        num_rows, num_heads, length, _ = query.shape
        out = value.new_zeros(num_rows, length, num_heads, value.shape[-1])  # [R, S, N, Dv]
        for rows, place in self._groups:
            part = (rows, slice(None), place)
            one = self._one(query[part], key[part], value[part], scores)  # [rows, N, document, Dv]
            out[rows, place] = one.transpose(1, 2)
        return out

    def _one(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        length = query.shape[2]
        windowed = scores.window is not None and length > scores.window
        window = scores.window if windowed else None
        if not scores.plain:
            return masked_attention(query, key, value, self._mask(length, window, query), scores)
        group = query.shape[1] // key.shape[1]
        if query.device.type == "cpu" and length <= SHORT:
            bias = self._bias(length, window, query, group)
            return product_attention(query, key, value, bias, scores.scale)
        if windowed:
            return masked_attention(query, key, value, self._mask(length, window, query), scores)
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scores.scale, enable_gqa=group > 1
        )

    def _mask(self, length: int, window: int | None, like: Tensor) -> Tensor:
        """Bool [1, 1, length, length]."""
        if (length, window) not in self._masks:
            position = torch.arange(length, device=like.device)
            self._masks[length, window] = visible(position[:, None], position[None, :], window)[None, None]
        return self._masks[length, window]

    def _bias(self, length: int, window: int | None, like: Tensor, group: int) -> Tensor:
        """[1, group * length, length] in the dtype of ``like``."""
        if (length, window, group) not in self._biases:
            mask = self._mask(length, window, like)[0]
            self._biases[length, window, group] = as_bias(mask, like.dtype).repeat(1, group, 1)
        return self._biases[length, window, group]


class DensePacking:
    """One bool mask [R, 1, S, S] per window: slow and obvious, the reference for the others."""

    def __init__(self, document_ids: Tensor) -> None:
        self.num_calls = 0
        self._document_ids = document_ids  # [R, S]
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See ``Rule``."""
        if scores.window not in self._masks:
            ids = self._document_ids
            place = torch.arange(ids.shape[1], device=ids.device)
            causal = visible(place[:, None], place[None, :], scores.window)  # [S, S]
            self._masks[scores.window] = (causal & (ids[:, :, None] == ids[:, None, :]))[:, None]  # [R, 1, S, S]
        return masked_attention(query, key, value, self._masks[scores.window], scores).transpose(1, 2)


class DecodeRule:
    """A query at position p sees the cached keys at 0..p of its own row (and within the window).

    With ``branches`` it sees of the new tokens its ancestors only, which are held elsewhere than at their positions.
    """

    def __init__(self, positions: Tensor, length: int, branches: Branches | None = None) -> None:
        self.num_calls = 0
        self._positions = positions  # [R, T]
        self._length = length
        self._branches = branches
        self._masks: dict[int | None, Tensor] = {}
        self._biases: dict[tuple[int | None, int, int], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See ``Rule``; here query is [R, N, T, D], key and value [R, G, L, D]."""
        group, num_pairs = query.shape[1] // key.shape[1], query.shape[0] * key.shape[1]
        if not scores.plain or group * query.shape[2] > FEW_QUERIES:
            return masked_attention(query, key, value, self._mask(scores.window), scores).transpose(1, 2)
        bias = self._bias(scores.window, group, num_pairs, query.dtype)
        return product_attention(query, key, value, bias, scores.scale).transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor:
        """Bool [R, 1, T, L]."""
        if window not in self._masks:
            keys = torch.arange(self._length, device=self._positions.device)
            self._masks[window] = self._visible(keys, window)[:, None]
        return self._masks[window]

    def _visible(self, keys: Tensor, window: int | None) -> Tensor:
        """Bool [R, T, L] for the places [L] of the keys."""
        positions, branches = self._positions, self._branches
        if branches is None:
            return visible(positions[:, :, None], keys, window)
        num_new = positions.shape[1]
        index = keys - branches.places[:, :1]  # [R, L], which of the new tokens it is
        new = (index >= 0) & (index < num_new)
        index, context = index.clamp(0, num_new - 1), index < 0
        ancestors = branches.ancestors.gather(2, index[:, None].expand(-1, num_new, -1))  # [R, T, L]
        key_positions = torch.where(new, positions.gather(1, index), keys)  # [R, L]
        near = visible(positions[:, :, None], key_positions[:, None], window)
        return near & (context[:, None] | (new[:, None] & ancestors))

    def _bias(self, window: int | None, group: int, num_pairs: int, dtype: torch.dtype) -> Tensor:
        """[R * G, group * T, L], made once per step."""
        key = (window, group, num_pairs)
        if key not in self._biases:
            bias = as_bias(self._mask(window), dtype).repeat(1, 1, group, 1)  # [R, 1, group * T, L]
            num_rows, _, num_queries, length = bias.shape
            bias = bias.expand(num_rows, num_pairs // num_rows, num_queries, length)
            self._biases[key] = bias.reshape(num_pairs, num_queries, length)
        return self._biases[key]


def _same_place(spans: tuple[tuple[tuple[int, int], ...], ...]) -> list[tuple[slice, slice]]:
    """Documents as (rows, tokens): neighbouring rows whose document has the same [start, end) form one group."""
    groups: list[tuple[slice, slice]] = []
    latest: dict[tuple[int, int], int] = {}  # place -> index in groups
    for row, documents in enumerate(spans):
        for start, end in documents:
            found = latest.get((start, end))
            if found is not None and groups[found][0].stop == row:
                groups[found] = (slice(groups[found][0].start, row + 1), slice(start, end))
            else:
                latest[start, end] = len(groups)
                groups.append((slice(row, row + 1), slice(start, end)))
    return groups
