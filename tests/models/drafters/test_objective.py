"""Objectives of whole blocks: alignment with the target's states, D-PACE by its formula, sums that add up."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from helixctl.models.drafters._layers import RMSNorm
from tests.models.drafters.dflash.builders import FACTS, gradients, make_model, make_shared, make_slot, packed_slot

MIXED = {"cross_entropy": 0.3, "kl": 0.7, "kl_temperature": 2.0, "l1": 0.2, "decay_gamma": 3.0}


def with_last_hidden(slot):
    generator = torch.Generator().manual_seed(11)
    last = torch.randn(*slot.input_ids.shape, FACTS.hidden_size, generator=generator)
    return dataclasses.replace(slot, last_hidden=last)


def shared_with_norm():
    norm = RMSNorm(FACTS.hidden_size, 1e-6)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(FACTS.hidden_size, generator=torch.Generator().manual_seed(2)))
    return make_shared(final_norm=norm.requires_grad_(False), logit_softcap=8.0)


def slots_of(model, slot, shared):
    """Per supervised slot in plain Python: (row, place, k, own scores, the target's scores of the token before)."""
    states = model(slot, shared)
    goal = shared.logits(shared.final_norm(slot.last_hidden))
    for row, place in slot.anchor_valid.nonzero().tolist():
        anchor = int(slot.anchors[row, place])
        document = slot.document_ids[row, anchor]
        for k in range(1, 5):
            i = anchor + k
            if i < slot.input_ids.shape[1] and slot.document_ids[row, i] == document and slot.loss_mask[row, i]:
                yield (row, place, k), shared.logits(states[row, place, k]), goal[row, i - 1], slot.input_ids[row, i]


def test_mixed_loss_is_the_sum_over_slots_against_the_state_before_each_label():
    slot, shared = with_last_hidden(packed_slot()), shared_with_norm()
    model = make_model(loss=MIXED)
    terms = model.loss(slot, shared)
    expected, weights, by_term = torch.zeros(()), 0.0, {"cross_entropy": 0.0, "kl": 0.0, "l1": 0.0}
    for (_, _, k), own, goal, label in slots_of(model, slot, shared):
        weight = float(torch.exp(torch.tensor(-(k - 1) / 3.0)))
        cross = F.cross_entropy(own[None], label[None])
        kl = 4.0 * F.kl_div((own / 2).log_softmax(0), (goal / 2).log_softmax(0), log_target=True, reduction="sum")
        l1 = (own.softmax(0) - goal.softmax(0)).abs().sum()
        expected = expected + weight * (0.3 * cross + 0.7 * kl + 0.2 * l1)
        weights += weight
        for name, value in zip(by_term, (cross, kl, l1), strict=True):
            by_term[name] += weight * float(value.detach())
    torch.testing.assert_close(terms.numerator, expected, rtol=1e-4, atol=1e-4)
    assert terms.denominator.item() == pytest.approx(weights, rel=1e-5)
    for name, value in by_term.items():
        assert terms.sums[f"term_{name}"].item() == pytest.approx(value, rel=1e-4)
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in gradients(make_model(loss=MIXED), slot, shared).items():
        torch.testing.assert_close(gradient * weights, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


def test_dpace_weighs_a_slot_by_what_the_accepted_length_gains_from_it():
    slot, shared = packed_slot(), make_shared()
    slot.loss_mask[0, 15] = False  # a hole inside blocks: passed over
    with_last = with_last_hidden(slot)
    model = make_model(loss={"position_weights": "dpace", "dpace_smoothing": 0.4})
    terms = model.loss(slot, shared)
    blocks: dict[tuple[int, int], list[torch.Tensor]] = {}
    for (row, place, _), own, _, label in slots_of(model, with_last, shared):
        blocks.setdefault((row, place), []).append(F.cross_entropy(own[None], label[None]))
    numerator, denominator = torch.zeros(()), 0.0
    for costs in blocks.values():
        sure = [0.6 * float(torch.exp(-cost.detach())) + 0.4 for cost in costs]
        for j, cost in enumerate(costs):
            weight = sum(math.prod(sure[: m + 1]) for m in range(j, len(costs)))
            numerator, denominator = numerator + weight * cost, denominator + weight
    torch.testing.assert_close(terms.numerator, numerator, rtol=1e-4, atol=1e-4)
    assert terms.denominator.item() == pytest.approx(denominator, rel=1e-4)
    numerator.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    same = make_model(loss={"position_weights": "dpace", "dpace_smoothing": 0.4})
    for name, gradient in gradients(same, slot, shared).items():
        torch.testing.assert_close(gradient * denominator, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("loss", [MIXED, {"position_weights": "dpace", "kl": 1.0}, {"kl": 1.0, "sampled_classes": 40}])
@pytest.mark.parametrize("backend", ["dense", "groups"])
def test_rows_add_up_and_validation_sums_are_the_same_loss(loss, backend):
    slot, shared, model = with_last_hidden(packed_slot()), shared_with_norm(), make_model(loss=loss, attention=backend)
    whole = model.loss(slot, shared)
    if "sampled_classes" not in loss:
        parts = []
        for row in range(2):
            tensors = {f.name: getattr(slot, f.name) for f in dataclasses.fields(slot)}
            own = {name: t[row : row + 1] for name, t in tensors.items() if isinstance(t, torch.Tensor)}
            part = dataclasses.replace(slot, **own, features=[f[row : row + 1] for f in slot.features])
            parts.append(model.loss(part, shared))
        torch.testing.assert_close(whole.numerator, parts[0].numerator + parts[1].numerator)
        for name, value in whole.sums.items():
            torch.testing.assert_close(value, parts[0].sums[name] + parts[1].sums[name])
        sums = model.evaluate(slot, shared)
        for name in ("loss_num", "loss_den", "term_cross_entropy", "term_kl", "prefix_sum", "num_blocks"):
            torch.testing.assert_close(sums[name], whole.sums[name], rtol=1e-4, atol=1e-4)
    assert whole.numerator.isfinite()


def test_noise_changes_training_only_and_repeats_for_a_micro_batch():
    slot, shared = packed_slot(), make_shared()
    slot.number = torch.tensor(4)
    plain, noisy = make_model(), make_model(feature_noise={"kind": "gaussian", "scale": 0.3})
    torch.testing.assert_close(noisy.evaluate(slot, shared), plain.evaluate(slot, shared))
    first, again = noisy.loss(slot, shared).numerator, noisy.loss(slot, shared).numerator
    assert torch.equal(first, again)
    assert not torch.allclose(first, plain.loss(slot, shared).numerator)
    slot.number = torch.tensor(5)
    assert not torch.equal(first, noisy.loss(slot, shared).numerator)


def test_a_slot_in_parts_has_the_same_noise_and_the_same_sums():
    slot, shared = with_last_hidden(packed_slot()), shared_with_norm()
    slot.number = torch.tensor(4)
    model = make_model(loss=MIXED, feature_noise={"kind": "uniform", "scale": 0.3})
    whole, parts = model.loss(slot, shared), [model.loss(part, shared) for part in slot.parts(1)]
    assert len(parts) == 2
    torch.testing.assert_close(whole.numerator, parts[0].numerator + parts[1].numerator)
    for name, value in whole.sums.items():
        torch.testing.assert_close(value, parts[0].sums[name] + parts[1].sums[name])


def test_kl_alone_learns_the_targets_choices_by_heart():
    slot, shared = with_last_hidden(make_slot([[24]], 24, [[2, 6, 9, 13, 15, 18]])), make_shared()
    assert slot.last_hidden is not None
    slot.last_hidden *= 3.0
    model = make_model(loss={"cross_entropy": 0.0, "kl": 1.0, "decay_gamma": None})
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    for _ in range(40):
        terms = model.loss(slot, shared)
        optimizer.zero_grad()
        (terms.numerator / terms.denominator).backward()
        optimizer.step()
    chosen = shared.logits(slot.last_hidden).argmax(-1)[0]
    drafted = shared.logits(model.drafted_states(slot, shared)).argmax(-1)[0]
    for place, anchor in enumerate([2, 6, 9, 13, 15, 18]):
        assert torch.equal(drafted[place], chosen[anchor : anchor + 4])
