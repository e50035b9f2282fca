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
from helixctl.errors import ModelError
from helixctl.models.flex import FlexCall, FlexPacking
from helixctl.models.scores import Scores, masked_attention, visible

IMPLEMENTATION = "helixctl_packed"
"""Our name in transformers' table of attention functions."""

Backend = Literal["segments", "flex", "dense"]


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
    rule.num_calls += 1
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


class SegmentPacking:
    """One call per document, rows whose document has the same place together. Padding gets zeros.

    The fast way on a CPU: work grows with the sum of squared document lengths, and no mask exists unless a document
    is longer than the window.
    """

    def __init__(self, spans: tuple[tuple[tuple[int, int], ...], ...]) -> None:
        self.num_calls = 0
        self._groups = _same_place(spans)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

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
        if scores.plain and not windowed:
            gqa = query.shape[1] != key.shape[1]
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scores.scale, enable_gqa=gqa
            )
        window = scores.window if windowed else None
        if (length, window) not in self._masks:
            position = torch.arange(length, device=query.device)
            self._masks[length, window] = visible(position[:, None], position[None, :], window)[None, None]
        return masked_attention(query, key, value, self._masks[length, window], scores)


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
    """A query at position p sees the cached keys at 0..p of its own row (and within the window)."""

    def __init__(self, positions: Tensor, length: int) -> None:
        self.num_calls = 0
        self._positions = positions  # [R, T]
        self._length = length
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See ``Rule``; here query is [R, N, T, D], key and value [R, G, L, D]."""
        num_rows, num_heads, num_new, _ = query.shape
        group = num_heads // key.shape[1]
        if not scores.plain:
            mask = self._mask(scores.window, 1, None)
            return masked_attention(query, key, value, mask, scores).transpose(1, 2)
        # Query heads that share a key head stand side by side as rows of one product: the cache is never repeated.
        query = query.reshape(num_rows, -1, group * num_new, query.shape[-1])  # [R, G, group*T, D]
        mask = self._mask(scores.window, group, query.dtype)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scale)
        return out.reshape(num_rows, num_heads, num_new, -1).transpose(1, 2)

    def _mask(self, window: int | None, repeats: int, dtype: torch.dtype | None) -> Tensor:
        """[R, 1, repeats*T, L]: bool, or the same as numbers to add in ``dtype`` (converted once, not per layer)."""
        key = (window, repeats if dtype is not None else 0)
        if key not in self._masks:
            keys = torch.arange(self._length, device=self._positions.device)
            mask = visible(self._positions[:, :, None], keys[None, None], window)[:, None]  # [R, 1, T, L]
            if dtype is not None:
                numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
                mask = numbers.repeat(1, 1, repeats, 1)
            self._masks[key] = mask
        return self._masks[key]


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
