from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from helixctl.models.drafters._terms import LossTerms
from helixctl.training.passes import TrainPass
from tests.models.drafters.dflash.builders import make_model, make_shared, packed_slot
from tests.models.drafters.dflash.test_model import GPU_SIZES, on_gpu


def trained(
    model: Any, shared: Any, slot: Any, rows: int, *, captured: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """Gradients and sums of a pass."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    train = TrainPass(lambda part: model.loss(part, shared), nullcontext, rows)
    if captured:
        train.capture([slot], torch.device("cuda:0"))
        assert train.num_captured == 1
        for parameter in model.parameters():
            parameter.grad.zero_()
    sums = {name: value.clone() for name, value in train(slot).items()}
    return [parameter.grad for parameter in model.parameters()], sums


@pytest.mark.parametrize("noise", [{}, {"feature_noise": {"kind": "gaussian", "scale": 0.1}}])
def test_rows_apart_give_the_gradients_and_sums_of_all_together(noise: dict[str, Any]) -> None:
    model, shared, slot = make_model(attention="dense", **noise), make_shared(), packed_slot()
    assert len(slot.input_ids) > 1
    whole, sums = trained(model, shared, slot, len(slot.input_ids))
    apart, sums_apart = trained(model, shared, slot, 1)
    for one, other in zip(apart, whole, strict=True):
        torch.testing.assert_close(one, other)
    assert sums.keys() == sums_apart.keys()
    for name, value in sums.items():
        torch.testing.assert_close(sums_apart[name], value, msg=name)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_sum_that_is_also_another_counts_once(rows: int) -> None:
    weight, slot = torch.ones((), requires_grad=True), packed_slot()
    assert len(slot.input_ids) == 2

    def loss(slot: Any) -> LossTerms:
        count = slot.loss_mask.sum().float()
        return LossTerms(weight * count, count, {"count": count})

    expected = slot.loss_mask.sum().float()
    assert TrainPass(loss, nullcontext, rows)(slot) == {"loss_num": expected, "loss_den": expected, "count": expected}
    assert weight.grad == expected


@pytest.mark.gpu
def test_a_replayed_pass_equals_the_launched_one() -> None:
    slot, shared = on_gpu(packed_slot()), on_gpu(make_shared())
    model = make_model(attention="flex", **GPU_SIZES).cuda()
    expected, sums = trained(model, shared, slot, 1)
    expected = [gradient.clone() for gradient in expected]
    model.compiles = True
    got, got_sums = trained(model, shared, slot, 1, captured=True)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-3 * float(other.abs().max()))
    for name, value in sums.items():
        torch.testing.assert_close(got_sums[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_replaying_never_waits_for_the_device() -> None:
    slot, shared = on_gpu(packed_slot()), on_gpu(make_shared())
    model = make_model(attention="flex", **GPU_SIZES).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    train = TrainPass(lambda part: model.loss(part, shared), nullcontext, 1)
    train.capture([slot], torch.device("cuda:0"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            train(slot)
    finally:
        torch.cuda.set_sync_debug_mode("default")
