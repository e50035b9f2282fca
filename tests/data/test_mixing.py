"""Weights are exact at the end of every block, whatever the documents are; content decides which are copied."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.data.mixing import BLOCK_DOCUMENTS, Copier, blocks, weight_for


def digests(num_documents: int, salt: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"{salt}:{i}".encode()).digest() for i in range(num_documents)]


@given(
    weight=st.floats(0.001, 20) | st.integers(1, 5).map(float) | st.sampled_from([0.1, 0.25, 1 / 3, 2.5]),
    sizes=st.lists(st.integers(1, 40), max_size=30),
)
def test_entries_are_the_weight_times_the_documents(weight: float, sizes: list[int]) -> None:
    copier, num_entries, num_documents = Copier(weight), 0, 0
    for salt, size in enumerate(sizes):
        copies = copier.copies(digests(size, salt))
        num_documents += size
        num_entries += sum(copies)
        exact = Fraction(str(weight)) * num_documents
        assert abs(num_entries - exact) <= Fraction(1, 2) and num_entries == copier.num_entries
        assert set(copies) <= {int(weight), int(weight) + 1}
    assert copier.is_even == (weight == int(weight))


@given(st.floats(0.01, 3), st.randoms(use_true_random=False))
def test_which_documents_are_copied_does_not_depend_on_their_order(weight: float, random) -> None:
    known = digests(60)
    before = Counter(dict(zip(known, Copier(weight).copies(known), strict=True)))
    random.shuffle(known)
    assert Counter(dict(zip(known, Copier(weight).copies(known), strict=True))) == before


def test_alternating_documents_are_sampled_evenly() -> None:
    """A rule of places, every second one, would take one kind only."""
    known = digests(4 * BLOCK_DOCUMENTS)
    copier = Copier(0.5)
    copies = [number for block in blocks(known) for number in copier.copies(block)]
    assert sum(copies) == 2 * BLOCK_DOCUMENTS
    assert abs(sum(copies[::2]) - BLOCK_DOCUMENTS) < BLOCK_DOCUMENTS / 4


@given(st.lists(st.integers(), max_size=3 * BLOCK_DOCUMENTS))
def test_blocks_hold_everything_in_order(items: list[int]) -> None:
    found = list(blocks(items))
    assert [item for block in found for item in block] == items
    assert all(len(block) == BLOCK_DOCUMENTS for block in found[:-1])


@pytest.mark.parametrize(("share", "own", "others"), [(0.5, 100, 300), (0.25, 300, 100), (0.9, 7, 1000)])
def test_the_advised_weight_gives_the_share(share: float, own: int, others: int) -> None:
    tokens = own * weight_for(share, own, others)
    assert tokens / (tokens + others) == pytest.approx(share)
