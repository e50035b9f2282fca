"""Block metrics that predict serving: accuracy by slot and the true accepted prefix.

Legend: n blocks, B block size.
"""

from __future__ import annotations

from torch import Tensor


def accepted_prefix(correct: Tensor, supervised: Tensor) -> Tensor:
    """How many drafted slots of each block are accepted, given the true tokens before it.

    Counts the leading slots that are right, until the first wrong one or the first without a label (the document's
    end). A mean over blocks is a true mean; neither a product of accuracies nor a mean accuracy says the same.

    Args:
        correct: [n, B-1] bool.
        supervised: [n, B-1] bool.

    Returns:
        [n] int64, without the bonus token.
    """
    return (correct & supervised).long().cumprod(dim=-1).sum(dim=-1)
