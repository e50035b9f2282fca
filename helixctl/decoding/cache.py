"""A key/value cache whose rows stand at positions of their own; rolling back costs nothing.

A new token overwrites whatever stood at its position, and a query at position p sees positions 0..p only (the mask is
``attention.DecodeRule``), so what lies beyond p - rejected drafts, right padding of a shorter prompt - is never seen.
Sliding-window layers keep the whole length; the mask makes the window.

Legend: R rows, T new tokens per row, L tokens a row can hold, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from helixctl.decoding.policy import RowCache

GROWTH = 64
"""Buffers grow by so many positions. Attention reads them whole: batched products copy a part of a buffer first."""


class RaggedCache(Cache):  # type: ignore[misc,unused-ignore]  # transformers is untyped in some releases
    """Buffers are made and grown by the forwards; say with ``at`` where the next forward's tokens stand."""

    def __init__(self, num_rows: int, max_len: int) -> None:
        super().__init__(layers=[])
        self.num_rows = num_rows
        self.max_len = max_len
        self._capacity = 0  # L of every buffer after the next forward
        self._keys: dict[int, Tensor] = {}  # layer -> [R, G, L, D]
        self._values: dict[int, Tensor] = {}
        self._positions: Tensor | None = None  # [R, T], where the next forward writes
        self._expected: int | None = None
        # (G, device) -> [R * G * T], the same in the flattened [R * G * L]; layers may stand on several devices
        self._places: dict[tuple[int, torch.device], Tensor] = {}

    def at(self, positions: Tensor, length: int | None = None) -> int:
        """The next forward writes row r's token t at ``positions[r, t]``.

        Args:
            positions: [R, T] int64, distinct within a row.
            length: Largest position + 1, where the caller knows it; else as ``expect`` said, else read from the device.

        Returns:
            L, the cached positions that attention will read (and mask).
        """
        # The host must know the shape of what attention reads: a synchronisation unless the caller says it.
        length = self._expected if length is None else length
        length = int(positions.max()) + 1 if length is None else length
        self._expected = None
        assert positions.shape[0] == self.num_rows, f"{positions.shape[0]} rows in a cache of {self.num_rows}"
        assert length <= self.max_len, f"position {length - 1} in a cache of {self.max_len}"
        self._positions = positions
        self._places = {}
        self._capacity = max(self._capacity, min(self.max_len, -(-length // GROWTH) * GROWTH))
        return self._capacity

    def move(self, sources: Tensor, places: Tensor) -> None:
        """Copy what row r holds at ``sources[r, t]`` to ``places[r, t]``, in every layer.

        Args:
            sources: [R, T] int64, positions that were written.
            places: [R, T] int64, distinct within a row, below the cache's length; may be among ``sources``.
        """
        flat: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}  # as in ``_places``
        for buffer in (*self._keys.values(), *self._values.values()):
            key = buffer.shape[1], buffer.device
            if key not in flat:
                flat[key] = _flat(sources, buffer), _flat(places, buffer)
            taken, put = flat[key]
            states = buffer.view(-1, buffer.shape[3])
            states.index_copy_(0, put, states.index_select(0, taken))

    def expect(self, length: int) -> None:
        """The next forward writes below position ``length``: its ``at`` then does not ask the device."""
        self._expected = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by every layer: stores [R, G, T, D] and returns the buffers [R, G, L, D]."""
        keys = self._write(self._keys, layer_idx, key_states)
        values = self._write(self._values, layer_idx, value_states)
        return keys, values

    def select(self, rows: Tensor) -> None:
        """Keep only ``rows`` (int64, in this order): finished rows stop costing."""
        for buffers in (self._keys, self._values):
            for layer, buffer in buffers.items():
                buffers[layer] = buffer.index_select(0, rows.to(buffer.device))
        self.num_rows = len(rows)
        self._positions = None

    def put(self, rows: Tensor, other: RowCache, taken: Tensor | None = None) -> None:
        """Copy rows of ``other``, which may be shorter, to ``rows`` (int64) of this cache, from position 0 on.

        ``taken`` (int64, as many as ``rows``) are the rows of ``other``; None is all of them, in order.
        """
        assert isinstance(other, RaggedCache) and other.max_len <= self.max_len
        self._capacity = max(self._capacity, other._capacity)
        for mine, theirs in ((self._keys, other._keys), (self._values, other._values)):
            for layer, states in theirs.items():
                new = states if taken is None else states.index_select(0, taken.to(states.device))
                room = self._room(mine, layer, states)[:, :, : states.shape[2]]
                room.index_copy_(0, rows.to(room.device), new)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing may be derived from the cache's length: positions are always given."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Positions that a row can hold."""
        return self.max_len

    def _write(self, buffers: dict[int, Tensor], layer: int, states: Tensor) -> Tensor:
        buffer = self._room(buffers, layer, states)
        num_heads, width = buffer.shape[1], buffer.shape[3]
        key = num_heads, buffer.device
        if key not in self._places:
            assert self._positions is not None, "update() before at()"
            self._places[key] = _flat(self._positions, buffer)
        buffer.view(-1, width).index_copy_(0, self._places[key], states.reshape(-1, width))
        return buffer

    def _room(self, buffers: dict[int, Tensor], layer: int, like: Tensor) -> Tensor:
        """The layer's buffer [R, G, L, D] with L = capacity; new room is zero, for even a masked NaN poisons a row."""
        old = buffers.get(layer)
        if old is None or old.shape[2] < self._capacity:
            new = like.new_zeros(self.num_rows, like.shape[1], self._capacity, like.shape[3])
            if old is not None:
                new[:, :, : old.shape[2]] = old
            buffers[layer] = new
        return buffers[layer]


def _flat(positions: Tensor, buffer: Tensor) -> Tensor:
    """Where the positions [R, T] are in a buffer [R, G, L, D] seen as [R * G * L, D]: [R * G * T]."""
    num_rows, num_heads, capacity, _ = buffer.shape
    heads = torch.arange(num_rows * num_heads, device=buffer.device).view(num_rows, num_heads, 1)
    return (heads * capacity + positions.to(buffer.device)[:, None]).view(-1)
