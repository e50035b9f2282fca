"""Backends agree, nothing leaks, the loss is the formula, and one document can be learned by heart."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helixctl.models.drafters import _group_attention
from helixctl.models.drafters._attention import DenseAttention, FlexAttention
from helixctl.models.drafters._blocks import make_blocks, slot_weights
from helixctl.models.private import interpreted
from tests.models.drafters.dflash.builders import (
    FACTS,
    MASK,
    gradients,
    make_model,
    make_shared,
    make_slot,
    packed_slot,
)

CPU_BACKENDS = ["dense", "groups", "flex"]
dynamo_instantiates_functions = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
GPU_SIZES: dict[str, Any] = {"head_dim": 16}  # the least that flex_attention takes there


def states(backend, slot, shared=None, **values):
    model = make_model(attention=backend, **values).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without")
        return model(slot, shared or make_shared())


@pytest.mark.parametrize("backend", ["groups", "flex"])
def test_backends_equal_the_dense_reference(backend):
    slot = packed_slot()
    out, expected = states(backend, slot), states("dense", slot)
    assert out.shape == (2, 6, 5, FACTS.hidden_size)
    assert out.isfinite().all() and expected.isfinite().all()
    torch.testing.assert_close(out[slot.anchor_valid], expected[slot.anchor_valid], rtol=1e-4, atol=1e-5)


def test_interpreted_blocks_of_a_device_use_one_mask():
    """flex_attention without its compiler is no kernel."""
    slot, model = packed_slot(), make_model()
    blocks = make_blocks(slot, 5, MASK)
    tensors: Any = {name: value.to("meta") for name, value in vars(blocks).items() if isinstance(value, torch.Tensor)}
    slot, blocks = (
        dataclasses.replace(slot, document_ids=slot.document_ids.to("meta")),
        dataclasses.replace(blocks, **tensors),
    )
    assert isinstance(model._attention(slot, blocks), FlexAttention)
    with interpreted():
        assert isinstance(model._attention(slot, blocks), DenseAttention)


@pytest.mark.parametrize(("most", "least"), [(1, 1), (2, 1), (3, 4), (16, 4)])
def test_gradients_of_groups_equal_the_dense_reference(monkeypatch, most, least):
    monkeypatch.setattr(_group_attention, "MAX_BLOCKS", most)
    monkeypatch.setattr(_group_attention, "MIN_BLOCKS", least)
    slot, shared = packed_slot(), make_shared()
    expected = gradients(make_model(attention="dense"), slot, shared)
    got = gradients(make_model(attention="groups"), slot, shared)
    assert got.keys() == expected.keys() == dict(make_model().named_parameters()).keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item(), msg=name)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_features_at_or_after_an_anchor_change_nothing_bit_for_bit(backend):
    slot = make_slot([[20]], 20, [[6, 7, 8, 9]])
    before = states(backend, slot)
    for place, anchor in enumerate([6, 7, 8, 9]):
        changed = copy.deepcopy(slot)
        for feature in changed.features:
            feature[:, anchor:] = feature[:, anchor:] * -3.0 + 7.0
        after = states(backend, changed)
        assert torch.equal(after[0, : place + 1], before[0, : place + 1])
        if place < 3:
            assert not torch.equal(after[0, place + 1], before[0, place + 1])  # this one does see the change


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_other_documents_and_other_blocks_change_nothing(backend):
    slot = packed_slot()
    before = states(backend, slot)
    changed = copy.deepcopy(slot)
    for feature in changed.features:
        feature[0, :9] += 5.0  # the first document; blocks 3, 4 and 5 stand in the second
    after = states(backend, changed)
    assert torch.equal(after[0, 3:], before[0, 3:])
    changed = copy.deepcopy(slot)
    changed.input_ids[0, 13] = 50 + changed.input_ids[0, 13] % 40
    after = states(backend, changed)
    keep = [0, 1, 2, 3, 5]
    assert torch.equal(after[0, keep], before[0, keep])
    assert not torch.equal(after[0, 4], before[0, 4])


def test_slots_of_a_block_see_each_other_in_both_directions():
    slot, model = packed_slot(), make_model(attention="dense")
    h = torch.zeros(60, FACTS.hidden_size, requires_grad=True)
    blocks = make_blocks(slot, 5, MASK)
    attention = model._attention(slot, blocks)
    contexts = model.context_key_values(model.project_features(slot.features), slot.position_ids)
    out = model.run_layers(h + 0.1, model.rotary(blocks.positions.flatten()), contexts, attention)
    out[2].sum().backward()  # block 0, slot 2
    assert h.grad is not None
    reached = (h.grad.abs().sum(1) > 0).tolist()
    assert reached == [True] * 5 + [False] * 55


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_invalid_blocks_are_finite_and_weigh_nothing(backend):
    slot = make_slot([[12], []], 12, [[3], []])
    out = states(backend, slot)
    assert out.isfinite().all()
    terms = make_model(attention="dense" if backend == "flex" else backend).loss(slot, make_shared())
    assert terms.sums["num_blocks"] == 1 and terms.sums["count"] == 4


@pytest.mark.parametrize("backend", ["groups", "dense"])
def test_a_micro_batch_without_anchors_has_zero_loss_and_gradients(backend):
    slot = make_slot([[12]], 12, [[]])
    model = make_model(attention=backend)
    terms = model.loss(slot, make_shared())
    terms.numerator.backward()
    assert terms.numerator.item() == 0 and terms.denominator.item() == 0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())
    assert model.evaluate(slot, make_shared())["num_blocks"] == 0


@pytest.mark.parametrize("gamma", [None, 3.0])
def test_loss_is_the_weighted_sum_over_supervised_slots(gamma):
    facts = dataclasses.replace(FACTS, embedding_scale=2.5, logit_softcap=4.0)
    slot, shared = packed_slot(), make_shared(facts)
    slot.loss_mask[0, 10:13] = False
    model = make_model(facts=facts, loss={"decay_gamma": gamma})
    blocks = make_blocks(slot, 5, MASK)
    logits = shared.logits(model(slot, shared))
    numerator, denominator, weight = torch.zeros(()), torch.zeros(()), slot_weights(5, gamma, torch.device("cpu"))
    for r, a, k in blocks.supervised.nonzero().tolist():
        numerator += weight[k - 1] * F.cross_entropy(logits[r, a, k], blocks.labels[r, a, k])
        denominator += weight[k - 1]
    terms = model.loss(slot, shared)
    torch.testing.assert_close(terms.numerator, numerator)
    torch.testing.assert_close(terms.denominator, denominator)
    torch.testing.assert_close(model.evaluate(slot, shared)["loss_num"], numerator)


def test_embedding_scale_reaches_the_blocks():
    slot = packed_slot()
    assert not torch.allclose(states("groups", slot), states("groups", slot, make_shared(embedding_scale=3.0)))


def test_terms_of_parts_add_up_to_the_whole():
    slot, shared, model = packed_slot(), make_shared(), make_model()
    whole = model.loss(slot, shared)
    parts = []
    for row in (0, 1):
        part = {f.name: getattr(slot, f.name) for f in dataclasses.fields(slot)}
        part = {n: v[row : row + 1] if isinstance(v, torch.Tensor) else v for n, v in part.items()}
        part["features"] = [f[row : row + 1] for f in slot.features]
        parts.append(model.loss(type(slot)(**part), shared))
    torch.testing.assert_close(whole.numerator, parts[0].numerator + parts[1].numerator)
    for name, value in whole.sums.items():
        torch.testing.assert_close(value, parts[0].sums[name] + parts[1].sums[name])


def test_projection_of_the_taps_equals_the_concatenated_one():
    model, slot = make_model(), packed_slot()
    expected = model.hidden_norm(model.fc(torch.cat(slot.features, dim=-1)))
    torch.testing.assert_close(model.project_features(slot.features), expected, rtol=1e-4, atol=1e-5)


def test_wild_taps_stay_close_in_bfloat16():
    model, slot = make_model(), packed_slot()
    slot.features[2][..., 3] = 25_000.0
    exact = model.project_features([f.bfloat16().double().float() for f in slot.features])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.project_features([f.bfloat16() for f in slot.features])
    assert rounded.dtype == torch.bfloat16
    assert F.cosine_similarity(rounded.float(), exact, dim=-1).min() > 0.999


def test_autocast_trains_float32_masters():
    slot, model, shared = packed_slot(), make_model(), make_shared()
    shared = dataclasses.replace(shared, embedding=shared.embedding.bfloat16(), head=shared.head.bfloat16())
    slot.features = [f.bfloat16() for f in slot.features]
    expected = gradients(model, slot, shared)
    with torch.autocast("cpu", torch.bfloat16):
        terms = model.loss(slot, shared)
    model.zero_grad()
    (terms.numerator / terms.denominator).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.dtype == torch.float32
        assert F.cosine_similarity(p.grad.flatten(), expected[name].flatten(), dim=0) > 0.98, name


def test_sampled_classes_repeat_per_micro_batch_and_validation_uses_all():
    slot, shared = packed_slot(), make_shared()
    sampled = make_model(loss={"sampled_classes": 8})
    first, second = sampled.loss(slot, shared).numerator, sampled.loss(slot, shared).numerator
    assert torch.equal(first, second)
    assert not torch.allclose(first, make_model().loss(slot, shared).numerator)
    torch.testing.assert_close(sampled.evaluate(slot, shared), make_model().evaluate(slot, shared))


@pytest.mark.parametrize(
    ("options", "capturable"),
    [
        ({}, True),
        ({"attention": "dense"}, True),
        ({"attention": "groups"}, False),
        ({"loss": {"sampled_classes": 4}}, False),
    ],
)
def test_what_asks_the_host_is_not_captured(options, capturable):
    assert make_model(**options).capturable == capturable


def test_one_document_is_learned_by_heart():
    slot, shared = make_slot([[24]], 24, [[2, 6, 9, 13, 15, 18]]), make_shared()
    model = make_model(loss={"decay_gamma": None})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(150):
        terms = model.loss(slot, shared)
        optimizer.zero_grad()
        (terms.numerator / terms.denominator).backward()
        optimizer.step()
    sums = model.evaluate(slot, shared)
    assert sums["loss_num"] / sums["loss_den"] < 0.02
    assert sums["prefix_sum"] / sums["num_blocks"] == 4  # block_size - 1, before the bonus
    assert torch.equal(sums["correct_k"], sums["count_k"])
    assert any((p - 1).abs().max() > 1e-3 for n, p in model.named_parameters() if "norm" in n)


@pytest.mark.slow
@dynamo_instantiates_functions
def test_whole_loss_traces_as_one_graph():
    slot, shared, model = packed_slot(), make_shared(), make_model(attention="dense")
    expected = model.loss(slot, shared)
    traced = torch.compile(model.loss, backend="eager", fullgraph=True, dynamic=False)(slot, shared)
    torch.testing.assert_close(traced.numerator, expected.numerator)
    torch.testing.assert_close(traced.sums, expected.sums)
    traced.numerator.backward()
    assert model.fc.weight.grad is not None


@pytest.mark.slow
@dynamo_instantiates_functions
def test_validation_with_flex_traces_as_one_graph():
    slot, shared, model = packed_slot(), make_shared(), make_model(attention="flex").requires_grad_(False)
    traced = torch.compile(model.evaluate, backend="eager", fullgraph=True, dynamic=False)(slot, shared)
    torch.testing.assert_close(traced, make_model(attention="dense").evaluate(slot, shared))


@dynamo_instantiates_functions
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "dense"])
def test_gpu_gradients_equal_the_cpu_reference(backend):
    slot, shared = packed_slot(), make_shared()
    expected = gradients(make_model(attention="dense", **GPU_SIZES), slot, shared)
    got = gradients(make_model(attention=backend, **GPU_SIZES).cuda(), on_gpu(slot), on_gpu(shared))
    for name, gradient in expected.items():
        torch.testing.assert_close(
            got[name].cpu(), gradient, rtol=1e-3, atol=2e-3 * gradient.abs().max().item(), msg=name
        )


@dynamo_instantiates_functions
@pytest.mark.gpu
@pytest.mark.parametrize("loss", [{}, {"sampled_classes": 8}])
def test_gpu_training_never_waits_for_the_device(loss):
    slot, shared = on_gpu(packed_slot()), on_gpu(make_shared())
    model = make_model(attention="flex", loss=loss, **GPU_SIZES).cuda()
    gradients(model, slot, shared)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(10):
            gradients(model, slot, shared)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dynamo_instantiates_functions
@pytest.mark.gpu
def test_gpu_compiled_step_equals_the_eager_one(monkeypatch):
    slot, shared = on_gpu(packed_slot()), on_gpu(make_shared())
    model = make_model(attention="flex", **GPU_SIZES).cuda()
    expected = gradients(model, slot, shared)
    monkeypatch.setattr(model, "loss", torch.compile(model.loss, fullgraph=True, dynamic=False))
    for name, gradient in gradients(model, slot, shared).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=2e-3 * gradient.abs().max().item())


@dynamo_instantiates_functions
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "dense"])
def test_gpu_leaks_nothing_bit_for_bit(backend):
    slot, shared = on_gpu(make_slot([[20]], 20, [[6, 7, 8, 9]])), on_gpu(make_shared())
    model = make_model(attention=backend, **GPU_SIZES).cuda().requires_grad_(False)
    before = model(slot, shared)
    for feature in slot.features:
        feature[:, 7:] += 5.0
    assert torch.equal(model(slot, shared)[0, :2], before[0, :2])


def on_gpu(value):
    """A copy of a slot or of shared weights on the GPU."""
    changes = {
        f.name: getattr(value, f.name).cuda()
        for f in dataclasses.fields(value)
        if isinstance(getattr(value, f.name), torch.Tensor)
    }
    if hasattr(value, "features"):
        changes["features"] = [f.cuda() for f in value.features]
    return dataclasses.replace(value, **changes)
