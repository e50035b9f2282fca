from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from helixctl.decoding.greedy import accepted_drafts, best_tokens, margins, sample_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_margins_are_the_gap_of_the_two_best(dtype):
    logits = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    top = logits.float().topk(2, dim=-1).values
    best = best_tokens(logits)
    assert torch.equal(margins(logits, best), top[..., 0] - top[..., 1])


def test_a_tie_has_no_margin():
    logits = torch.tensor([[[1.0, 3.0, 3.0]]])
    assert margins(logits, best_tokens(logits)).item() == 0.0


def test_accepted_drafts_stop_at_the_first_difference():
    choices = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    assert accepted_drafts(drafts, choices).tolist() == [3, 1, 0]
    assert accepted_drafts(drafts[:, :0], choices[:, :1]).tolist() == [0, 0, 0]


def test_samples_follow_the_distribution():
    share = torch.tensor([0.5, 0.0, 0.2, 0.3])
    rows = share.log().expand(4000, 4)
    rng = random.Random(0)
    counts = Counter(sample_tokens(rows, 1.0, [rng] * 4000).tolist())
    assert counts[1] == 0
    for token, expected in enumerate(share.tolist()):
        assert counts[token] / 4000 == pytest.approx(expected, abs=0.03)


def test_a_low_temperature_is_greedy():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    picked = sample_tokens(logits, 1e-4, [random.Random(i) for i in range(5)])
    assert torch.equal(picked, logits.argmax(-1))
