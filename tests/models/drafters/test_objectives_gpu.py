"""Objectives and algorithms on a GPU against the CPU reference: gradients, no waiting, one graph, no recompilation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from helixctl.models.drafters.dflash.model import DFlashDraftModel
from helixctl.plugins import DRAFTERS, load_plugin
from tests.models.drafters.dflash.builders import FACTS, MASK, TAPS, gradients, packed_slot
from tests.models.drafters.test_objective import shared_with_norm, with_last_hidden

# head_dim 16 is the least that flex_attention takes on a GPU.
BASE: dict[str, Any] = {"num_layers": 2, "num_taps": 3, "block_size": 5, "num_anchors": 6, "mask_token_id": MASK}
CASES: dict[str, dict[str, Any]] = {
    "dflash": {"loss": {"cross_entropy": 0.3, "kl": 0.7, "kl_temperature": 2.0}},
    "dflash with dpace": {"loss": {"position_weights": "dpace", "kl": 0.5}},
    "dflash with noise": {"feature_noise": {"kind": "gaussian", "scale": 0.3}, "loss": {"kl": 0.5}},
    "jetspec": {},
    "dspark": {"markov_rank": 8},
}
traced = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def make_model(case: str, **values: Any) -> DFlashDraftModel:
    algorithm = case.split(" ")[0]
    options = load_plugin(DRAFTERS, algorithm, "options").Options
    plugin: Any = load_plugin(DRAFTERS, algorithm, "plugin")
    model = plugin.build(options.model_validate(BASE | {"head_dim": 16} | CASES[case] | values), FACTS, TAPS, 0)
    assert isinstance(model, DFlashDraftModel)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.15 if p.dim() > 1 else 1 + 0.2 * noise)
    return model


def make_slot() -> Any:
    slot = with_last_hidden(packed_slot())
    slot.number = torch.tensor(4)
    return slot


def on_gpu(value: Any) -> Any:
    """A copy of a slot or of shared weights on the GPU."""
    held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    moved: dict[str, Any] = {
        name: item.cuda() for name, item in held.items() if isinstance(item, torch.Tensor | torch.nn.Module)
    }
    if "features" in held:
        moved["features"] = [feature.cuda() for feature in held["features"]]
    return dataclasses.replace(value, **moved)


@pytest.mark.slow
@traced
@pytest.mark.parametrize("case", ["dflash with noise", "dspark"])
def test_the_whole_loss_traces_as_one_graph(case: str) -> None:
    slot, shared, model = make_slot(), shared_with_norm(), make_model(case, attention="dense")
    expected = model.loss(slot, shared)
    found = torch.compile(model.loss, backend="eager", fullgraph=True, dynamic=False)(slot, shared)
    torch.testing.assert_close(found.numerator, expected.numerator)
    torch.testing.assert_close(found.sums, expected.sums)
    found.numerator.backward()
    assert model.fc.weight.grad is not None


@traced
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_cpu_reference(case: str, backend: str) -> None:
    expected = gradients(make_model(case, attention="dense"), make_slot(), shared_with_norm())
    model = make_model(case, attention=backend).cuda()
    for name, gradient in gradients(model, on_gpu(make_slot()), on_gpu(shared_with_norm())).items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient.cpu(), expected[name], rtol=2e-3, atol=5e-3 * scale, msg=name)


@traced
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_training_and_validation_neither_wait_nor_recompile(case: str) -> None:
    slot, shared, model = on_gpu(make_slot()), on_gpu(shared_with_norm()), make_model(case, attention="flex").cuda()
    gradients(model, slot, shared)
    model.evaluate(slot, shared)
    torch.compiler.set_stance("fail_on_recompile")
    try:
        torch.cuda.set_sync_debug_mode("error")
        for number in range(5, 9):
            slot.number.fill_(number)
            gradients(model, slot, shared)
            model.evaluate(slot, shared)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.compiler.set_stance("default")


@traced
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_cuda_graph_of_the_loss_follows_the_slot(case: str) -> None:
    slot, shared, model = on_gpu(make_slot()), on_gpu(shared_with_norm()), make_model(case, attention="flex").cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.loss(slot, shared).numerator.backward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        numerator = model.loss(slot, shared).numerator.detach()
    for feature in slot.features:
        feature.mul_(0.5)
    slot.number.fill_(9)
    graph.replay()
    torch.testing.assert_close(numerator, model.loss(slot, shared).numerator.detach(), rtol=1e-3, atol=1e-3)
