"""The chunked head against full float64 logits, and the sampled classes."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F

from helixctl.models.drafters import _head
from helixctl.models.drafters._head import Head, head_logits, head_loss, sample_head

N, C, H = 37, 50, 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(_head, "CPU_CHUNK_ROWS", 10)
    monkeypatch.setattr(_head, "CPU_SOFTMAX_SCORES", 4 * C)


def inputs(softcap=None, with_bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator)
    bias = torch.randn(C, generator=generator) if with_bias else None
    head = Head(torch.randn(C, H, generator=generator), bias, softcap)
    labels = torch.randint(0, C, (N,), generator=generator)
    weights = torch.rand(N, generator=generator)
    weights[5] = 0.0
    return hidden.requires_grad_(), head, labels, weights


def living_chunks(monkeypatch, module, name: str) -> list[int]:
    """Filled with the number of logits that live when the next chunk's are judged, these included."""
    made, living = [], []
    original = getattr(module, name)

    def counting(device):
        judge = original(device)

        def judged(logits, *rest):
            made.append(weakref.ref(logits))
            living.append(sum(one() is not None for one in made))
            return judge(logits, *rest)

        return judged

    monkeypatch.setattr(module, name, counting)
    return living


def test_one_chunk_of_logits_lives_at_a_time(monkeypatch):
    living = living_chunks(monkeypatch, _head, "chunk_loss_for")
    head_loss(*inputs())
    assert living == [1] * 4


def reference(hidden, head, labels, weights):
    """Full logits, float64."""
    x = hidden.detach().double().requires_grad_()
    logits = x @ head.weight.double().t()
    if head.bias is not None:
        logits = logits + head.bias.double()
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    right = logits.argmax(1) == labels
    if head.correction is not None:
        logits = logits + head.correction.double()
    loss = (F.cross_entropy(logits, labels, reduction="none") * weights.double()).sum()
    loss.backward()
    return loss.detach(), x.grad, right


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_loss_and_gradient_equal_full_float64_logits(softcap, with_bias, corrected):
    hidden, head, labels, weights = inputs(softcap, with_bias)
    if corrected:
        head = Head(head.weight, head.bias, softcap, torch.linspace(0, 3, C))
    loss, right = head_loss(hidden, head, labels, weights)
    (loss / 7).backward()
    expected, gradient, expected_right = reference(hidden, head, labels, weights)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double() * 7, gradient, rtol=1e-4, atol=1e-5)
    assert torch.equal(right, expected_right)
    assert hidden.grad[5].abs().max() == 0


def test_bfloat16_head_keeps_the_gradient_close():
    hidden, head, labels, weights = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = head_loss(hidden, Head(head.weight.bfloat16(), None, None), labels, weights)
    loss.backward()
    expected, gradient, _ = reference(hidden, head, labels, weights)
    assert hidden.grad.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 0.01 * expected.item()
    assert F.cosine_similarity(hidden.grad.double().flatten(), gradient.flatten(), dim=0) > 0.999


def test_no_slots_give_a_zero_that_can_be_differentiated():
    hidden, head, labels, weights = inputs()
    loss, right = head_loss(hidden[:0], head, labels[:0], weights[:0])
    loss.backward()
    assert loss.item() == 0 and right.shape == (0,)
    assert hidden.grad.abs().max() == 0


def test_without_gradient_nothing_is_kept():
    hidden, head, labels, weights = inputs()
    with torch.no_grad():
        loss, _ = head_loss(hidden, head, labels, weights)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.double(), reference(hidden, head, labels, weights)[0], rtol=1e-5, atol=1e-5)


def test_logits_of_decoding_apply_bias_and_softcap():
    hidden, head, *_ = inputs(3.0, True)
    expected = 3.0 * torch.tanh((hidden @ head.weight.t() + head.bias) / 3.0)
    torch.testing.assert_close(head_logits(hidden, head), expected)


def test_sample_holds_every_label_and_repeats():
    _, head, labels, _ = inputs()
    labels = labels[:9]
    small, places, _ = sample_head(head, labels, 12, seed=4)
    assert small.weight.shape == (21, H)
    assert torch.equal(small.weight[places], head.weight[labels])
    again, *_ = sample_head(head, labels, 12, seed=4)
    other, *_ = sample_head(head, labels, 12, seed=5)
    assert torch.equal(small.weight, again.weight)
    assert not torch.equal(small.weight, other.weight)
    num_labels = labels.unique().numel()
    assert small.correction is not None
    expected = torch.log(torch.tensor((C - num_labels) / (21 - num_labels)))
    torch.testing.assert_close(small.correction.max(), expected)
    assert int((small.correction == 0).sum()) == num_labels


def test_sampled_sum_over_the_vocabulary_is_right_in_expectation():
    hidden, head, labels, _ = inputs()
    labels, x = labels[:4], hidden[0].detach() * 0.2
    exact = (head.weight @ x).exp().sum()
    estimates = []
    for seed in range(400):
        small, *_ = sample_head(head, labels, 10, seed)
        estimates.append((small.weight @ x + small.correction).exp().sum())
    torch.testing.assert_close(torch.stack(estimates).mean(), exact, rtol=0.03, atol=0)


def test_sample_of_everything_is_the_full_head():
    hidden, head, labels, weights = inputs()
    small, places, _ = sample_head(head, labels, C, seed=0)
    torch.testing.assert_close(
        head_loss(hidden, small, places, weights)[0], head_loss(hidden, head, labels, weights)[0]
    )
