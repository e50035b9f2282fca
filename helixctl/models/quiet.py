"""Keeps transformers' progress bars and reports out of what our commands print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def silence_transformers() -> None:
    """No bars for loading and writing weights in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@contextmanager
def expecting(ending: str) -> Iterator[None]:
    """While this is open, tensors of a checkpoint whose names end so are not reported as left over."""
    import transformers

    base: Any = transformers.PreTrainedModel
    original = base._keys_to_ignore_on_load_unexpected
    base._keys_to_ignore_on_load_unexpected = [*(original or ()), rf"\.{ending}$"]
    try:
        yield
    finally:
        base._keys_to_ignore_on_load_unexpected = original


@contextmanager
def no_bars() -> Iterator[None]:
    """No bar of tqdm's own while this is open: its reader of GGUF files goes round the switch above."""
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils
    original = reader.tqdm
    reader.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        reader.tqdm = original
