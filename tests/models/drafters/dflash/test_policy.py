"""The decode policy and the training forward are one function."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from helixctl.decoding.greedy import best_tokens
from helixctl.decoding.policy import DraftCall
from helixctl.models.drafters.dflash import plugin
from tests.models.drafters.dflash.builders import make_model, make_shared, make_slot


def row_features(slot, start, end):
    return [f[:, start:end] for f in slot.features]


def test_block_logits_of_training_equal_those_of_decoding():
    slot, shared, model = make_slot([[30]], 30, [[7, 8, 15, 20, 25]]), make_shared(), make_model()
    trained = shared.logits(model(slot, shared)[:, :, 1:])  # [1, A, B-1, V]
    policy = plugin.policy(model, shared)
    policy.start(1, 30)
    done = 0
    for place, anchor in enumerate([7, 8, 15, 20, 25]):
        positions = torch.arange(done, anchor)[None]
        policy.extend(row_features(slot, done, anchor), positions, torch.ones_like(positions, dtype=torch.bool))
        done = anchor
        logits = policy.draft_logits(slot.input_ids[:, anchor], torch.tensor([anchor]))
        torch.testing.assert_close(logits, trained[:, place], rtol=1e-4, atol=1e-4)
        drafts = policy.draft(
            slot.input_ids[:, anchor], torch.tensor([anchor]), DraftCall(logits.shape[1] + 1, best_tokens)
        )
        assert torch.equal(drafts, logits.argmax(-1))


def test_rows_at_different_positions_and_taken_back_tokens():
    slot, shared, model = make_slot([[30], [30]], 30, [[11], [19]]), make_shared(), make_model()
    trained = shared.logits(model(slot, shared)[:, 0, 1:])  # [2, B-1, V]
    policy = plugin.policy(model, shared)
    policy.start(2, 30)
    positions = torch.arange(19).expand(2, -1)
    policy.extend(row_features(slot, 0, 19), positions, positions < torch.tensor([[11], [19]]))
    # What a rejected draft left behind at 11 and after must not show, nor must entries that are not valid.
    junk = [torch.full((2, 3, f.shape[-1]), 9.0) for f in slot.features]
    policy.extend(junk, torch.tensor([[11, 12, 13], [4, 5, 6]]), torch.tensor([[True] * 3, [False] * 3]))
    logits = policy.draft_logits(slot.input_ids.gather(1, slot.anchors[:, :1])[:, 0], torch.tensor([11, 19]))
    torch.testing.assert_close(logits, trained, rtol=1e-4, atol=1e-4)


def test_first_token_may_be_the_anchor():
    slot, shared, model = make_slot([[30]], 30, [[0]]), make_shared(), make_model()
    policy = plugin.policy(model, shared)
    policy.start(1, 4)
    logits = policy.draft_logits(slot.input_ids[:, 0], torch.tensor([0]))
    torch.testing.assert_close(logits, shared.logits(model(slot, shared)[:, 0, 1:]), rtol=1e-4, atol=1e-4)


def test_policy_is_a_snapshot_in_the_targets_type():
    slot, model = make_slot([[30]], 30, [[12]]), make_model()
    shared = make_shared()
    half = make_shared(embedding=shared.embedding.bfloat16(), head=shared.head.bfloat16())
    exact, rounded = plugin.policy(model, shared), plugin.policy(model, half)
    with torch.no_grad():
        model.fc.weight.zero_()
    logits = []
    for policy in (exact, rounded):
        policy.start(1, 30)
        positions = torch.arange(12)[None]
        policy.extend(row_features(slot, 0, 12), positions, positions >= 0)
        logits.append(policy.draft_logits(slot.input_ids[:, 12], torch.tensor([12])))
    assert logits[1].dtype == torch.bfloat16
    assert F.cosine_similarity(logits[0].flatten(), logits[1].float().flatten(), dim=0) > 0.99
    assert model.fc.weight.dtype == torch.float32


def test_a_shorter_block_is_what_a_drafter_of_that_size_would_see():
    """Decoding with fewer slots, as an engine does: not the first slots of the whole block."""
    slot, shared = make_slot([[30]], 30, [[12]]), make_shared()
    model = make_model()
    whole, short = plugin.policy(model, shared), plugin.policy(make_model(block_size=3), shared)
    logits = []
    for policy in (whole, short):
        policy.start(1, 30)
        positions = torch.arange(12)[None]
        policy.extend(row_features(slot, 0, 12), positions, positions >= 0)
        logits.append(policy.draft_logits(slot.input_ids[:, 12], torch.tensor([12]), size=3, length=15))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    assert logits[0].shape[1] == 2
    assert not torch.allclose(logits[0], whole.draft_logits(slot.input_ids[:, 12], torch.tensor([12]))[:, :2])
