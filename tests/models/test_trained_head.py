"""The head that is trained, in chunks, against full float64 logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helixctl.models.drafters import _head
from helixctl.models.trained_head import trained_head_loss
from tests.models.drafters.test_head import living_chunks

N, V, H = 37, 50, 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(_head, "CPU_CHUNK_ROWS", 10)
    monkeypatch.setattr(_head, "CPU_SOFTMAX_SCORES", 4 * V)


def inputs(with_bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=generator), torch.randn(V, H, generator=generator)
    bias = torch.randn(V, generator=generator).requires_grad_() if with_bias else None
    labels = torch.randint(0, V, (N,), generator=generator)
    weights = torch.rand(N, generator=generator)
    weights[5] = 0.0
    return hidden.requires_grad_(), weight.requires_grad_(), bias, labels, weights


def test_one_chunk_of_logits_lives_at_a_time(monkeypatch):
    living = living_chunks(monkeypatch, _head, "chunk_loss_for")
    hidden, weight, bias, labels, weights = inputs()
    trained_head_loss(hidden, weight, bias, None, labels, weights)
    assert living == [1] * 4


def reference(hidden, weight, bias, softcap, labels, weights):
    """Full logits, float64: loss, right, and the gradients."""
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    states, head, offset = leaves
    assert states is not None and head is not None
    logits = F.linear(states, head, offset)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = (F.cross_entropy(logits, labels, reduction="none") * weights.double()).sum()
    loss.backward()
    return loss.detach(), logits.argmax(1) == labels, [None if x is None else x.grad for x in leaves]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_loss_and_all_gradients_equal_full_float64_logits(softcap, with_bias):
    hidden, weight, bias, labels, weights = inputs(with_bias)
    loss, right = trained_head_loss(hidden, weight, bias, softcap, labels, weights)
    (loss / 7).backward()
    expected, expected_right, gradients = reference(hidden, weight, bias, softcap, labels, weights)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(right, expected_right)
    for leaf, gradient in zip((hidden, weight, bias), gradients, strict=True):
        if leaf is not None:
            torch.testing.assert_close(leaf.grad.double() * 7, gradient, rtol=1e-4, atol=1e-5)
    assert hidden.grad[5].abs().max() == 0


def test_bfloat16_products_keep_float32_gradients_close():
    hidden, weight, _, labels, weights = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = trained_head_loss(hidden, weight, None, None, labels, weights)
    loss.backward()
    expected, _, (by_hidden, by_weight, _) = reference(hidden, weight, None, None, labels, weights)
    assert weight.grad.dtype == hidden.grad.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 0.01 * expected.item()
    for leaf, gradient in ((hidden, by_hidden), (weight, by_weight)):
        assert F.cosine_similarity(leaf.grad.double().flatten(), gradient.flatten(), dim=0) > 0.999


def test_a_tied_head_adds_its_gradient_to_the_embeddings():
    table = nn.Embedding(V, H)
    ids = torch.arange(N) % V
    loss, _ = trained_head_loss(table(ids), table.weight, None, None, ids, torch.ones(N))
    loss.backward()
    plain = table.weight.detach().clone().requires_grad_()
    F.cross_entropy(plain[ids] @ plain.t(), ids, reduction="sum").backward()
    torch.testing.assert_close(table.weight.grad, plain.grad, rtol=1e-4, atol=1e-5)


def test_without_gradients_the_loss_is_the_same():
    hidden, weight, _, labels, weights = inputs()
    with torch.no_grad():
        loss, right = trained_head_loss(hidden, weight, None, None, labels, weights)
    again, right_again = trained_head_loss(hidden, weight, None, None, labels, weights)
    assert not loss.requires_grad and torch.equal(loss, again.detach()) and torch.equal(right, right_again)


def test_a_second_backward_is_refused():
    hidden, weight, _, labels, weights = inputs()
    loss, _ = trained_head_loss(hidden, weight, None, None, labels, weights)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        loss.backward()


@pytest.mark.gpu
def test_a_gpu_computes_what_the_cpu_does():
    hidden, weight, _, labels, weights = inputs()
    loss, right = trained_head_loss(hidden, weight, None, None, labels, weights)
    loss.backward()
    on_gpu = [x.detach().cuda() for x in (hidden, weight, labels, weights)]
    states, head = on_gpu[0].requires_grad_(), on_gpu[1].requires_grad_()
    gpu_loss, gpu_right = trained_head_loss(states, head, None, None, on_gpu[2], on_gpu[3])
    gpu_loss.backward()
    torch.testing.assert_close(gpu_loss.cpu(), loss, rtol=1e-4, atol=1e-3)
    assert torch.equal(gpu_right.cpu(), right)
    torch.testing.assert_close(head.grad.cpu(), weight.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(states.grad.cpu(), hidden.grad, rtol=1e-3, atol=1e-3)
