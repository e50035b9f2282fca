"""The accepted prefix, by hand."""

from __future__ import annotations

import torch

from helixctl.models.drafters._metrics import accepted_prefix


def test_one_block_right_and_one_wrong_accept_three_and_a_half():
    correct = torch.tensor([[True] * 7, [False] * 7])
    prefix = accepted_prefix(correct, torch.ones_like(correct))
    assert prefix.tolist() == [7, 0]
    assert prefix.float().mean() + 1 == 4.5  # the bonus token


def test_prefix_stops_at_the_first_wrong_slot_and_at_the_documents_end():
    correct = torch.tensor([[True, False, True], [True, True, True], [False, True, True]])
    supervised = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    assert accepted_prefix(correct, supervised).tolist() == [1, 2, 0]
