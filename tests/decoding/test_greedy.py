from __future__ import annotations

import pytest
import torch

from helixctl.decoding.greedy import accepted_drafts, best_tokens, margins


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
