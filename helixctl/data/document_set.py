"""Windows of tokenised documents as a map-style dataset for loaders with worker processes.

What a worker gets is the path of the store, not its content; lists become two flat arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch.utils.data import Dataset

from helixctl.data.token_batch import TokenBatch, make_token_batch
from helixctl.data.window_set import Documents, Windows
from helixctl.data.windows import Shard, WindowOptions


class WindowDataset(Dataset[TokenBatch]):
    """Windows by number; ``dataset[[3, 1, 4]]`` is the batch of three."""

    def __init__(self, documents: Documents, options: WindowOptions, *, shuffle: bool) -> None:
        """``shuffle``: documents stand in another order in every stage; else in their own.

        Raises:
            DataError: the documents fill no window.
        """
        self.windows = Windows(documents, options, shuffle=shuffle)

    @property
    def options(self) -> WindowOptions:
        """How documents become batches."""
        return self.windows.options

    @property
    def counts(self) -> Mapping[str, int]:
        """What was left out: ``tail_tokens`` and ``too_short`` documents."""
        return self.windows.counts

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.windows)

    def __getitem__(self, windows: Sequence[int]) -> TokenBatch:
        return make_token_batch([self.windows.window(number) for number in windows], self.options)


class BatchOrder:
    """Which windows make which batch: the sampler of a loader, in the main process.

    Every rank gets equally many batches and no window of another; the last ones may have fewer rows, or none.
    """

    def __init__(self, windows: Windows, shard: Shard, *, shuffle: bool) -> None:
        self._windows = windows
        self._shard = shard
        self._shuffle = shuffle
        self._epoch = 0
        self._first = 0
        share = -(-len(windows) // shard.world_size)
        self.num_batches = -(-share // windows.options.rows)
        """Batches of this rank per epoch."""

    def begin(self, epoch: int, first: int) -> None:
        """The next iteration begins at batch ``first`` of ``epoch``."""
        self._epoch, self._first = epoch, first

    def __len__(self) -> int:
        return self.num_batches - self._first

    def __iter__(self) -> Iterator[list[int]]:
        order = self._windows.order(self._epoch) if self._shuffle else np.arange(len(self._windows))
        own = order[self._shard.rank :: self._shard.world_size]
        rows = self._windows.options.rows
        for batch in range(self._first, self.num_batches):
            yield own[batch * rows : (batch + 1) * rows].tolist()
