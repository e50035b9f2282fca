"""Where blocks begin: which positions may carry an anchor, and which of them a row draws.

Position i is eligible iff i and i + 1 are supervised and belong to one document (the anchor is a real token of the
answer, and the first drafted token has a label). S tokens per row, A anchors per row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]


def eligible_anchors(loss_mask: BoolArray, document_ids: NDArray[np.integer]) -> BoolArray:
    """Eligible positions, bool [S], of a row with ``loss_mask`` bool [S] and ``document_ids`` [S] (-1 on padding)."""
    eligible = np.zeros(loss_mask.shape, dtype=np.bool_)
    same_document = (document_ids[:-1] == document_ids[1:]) & (document_ids[:-1] >= 0)
    eligible[:-1] = loss_mask[:-1] & loss_mask[1:] & same_document
    return eligible


def first_anchor(loss_mask: BoolArray) -> int:
    """First eligible position of one document with ``loss_mask`` bool [S], or -1 where it has none."""
    pairs = loss_mask[:-1] & loss_mask[1:]
    first = int(pairs.argmax()) if pairs.size else 0
    return first if pairs.size and bool(pairs[first]) else -1


def draw_anchors(
    loss_mask: BoolArray,
    document_ids: NDArray[np.integer],
    num_anchors: int,
    rng: np.random.Generator,
    per_document: int | None = None,
) -> tuple[NDArray[np.int64], BoolArray]:
    """Draw ``num_anchors`` of a row's eligible positions, uniformly and without replacement.

    With ``per_document`` only so many of each document's positions, drawn alike, are eligible.

    Returns:
        anchors int64 [A], sorted, 0 where unused; valid bool [A], the used ones first.
    """
    candidates = np.flatnonzero(eligible_anchors(loss_mask, document_ids))
    if per_document is not None:
        candidates = _some_of_each(candidates, document_ids[candidates], per_document, rng)
    if candidates.size > num_anchors:
        candidates = np.sort(rng.choice(candidates, num_anchors, replace=False, shuffle=False))
    anchors = np.zeros(num_anchors, dtype=np.int64)
    anchors[: candidates.size] = candidates
    return anchors, np.arange(num_anchors) < candidates.size


def _some_of_each(
    candidates: NDArray[np.intp], documents: NDArray[np.integer], count: int, rng: np.random.Generator
) -> NDArray[np.intp]:
    """At most ``count`` of the ``candidates`` of each document, in order; ``documents`` are theirs, ascending."""
    order = np.lexsort((rng.random(candidates.size), documents))
    first = np.searchsorted(documents, documents)  # where each one's document begins among them
    return np.sort(candidates[order[np.arange(candidates.size) - first < count]])
