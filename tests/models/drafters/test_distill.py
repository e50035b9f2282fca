"""Slot losses in chunks against full float64 logits: values, gradients, every combination of terms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helixctl.models.drafters import _distill, _head
from helixctl.models.drafters._distill import LowRank, Mix, Teacher, slot_losses
from helixctl.models.drafters._head import Head, head_loss
from tests.models.drafters.test_head import living_chunks

N, C, H, T, RANK = 37, 50, 16, 23, 5
MIXES = {
    "kl": Mix(0.0, 1.0),
    "mostly kl": Mix(0.02, 0.98),  # a public trainer's gradient was wrong there
    "soft kl": Mix(0.0, 1.0, 3.0),
    "l1": Mix(0.0, 0.0, 1.0, 1.0),
    "all": Mix(0.1, 0.5, 2.0, 0.9),
    "cross-entropy": Mix(1.0),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(_head, "CPU_CHUNK_ROWS", 10)
    monkeypatch.setattr(_head, "CPU_SOFTMAX_SCORES", 4 * C)


class Case:
    """Random states, head and teacher; slot 5 weighs nothing."""

    def __init__(self, softcap=None, correction=False, dtype=torch.float32, device="cpu"):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        self.hidden, self.left, self.right = normal(N, H), normal(N, RANK), normal(C, RANK)
        steps = torch.linspace(0, 3, C, device=device) if correction else None
        self.head = Head(normal(C, H).to(dtype), normal(C), softcap, steps)
        self.labels = torch.randint(0, C, (N,), generator=generator).to(device)
        self.weights = torch.rand(N, generator=generator).to(device)
        self.weights[5] = 0.0
        rows = torch.randint(0, T, (N,), generator=generator).to(device)
        self.teacher = Teacher(normal(T, H).to(dtype), rows)

    def run(self, mix, low_rank=False):
        """Loss, gradients and the losses themselves."""
        leaves = [t.clone().requires_grad_() for t in (self.hidden, self.left, self.right)[: 3 if low_rank else 1]]
        extra = LowRank(*leaves[1:]) if low_rank else None
        teacher = self.teacher if mix.kl or mix.has_l1 else None
        found = slot_losses(leaves[0], self.head, (self.labels, self.weights), mix, teacher, extra)
        (found.loss.sum() / 7).backward()
        return found, [leaf.grad for leaf in leaves]

    def reference(self, mix, low_rank=False):
        """Full logits, float64, autograd."""
        leaves = [t.double().requires_grad_() for t in (self.hidden, self.left, self.right)[: 3 if low_rank else 1]]
        own = self._scores(leaves[0], leaves[1] @ leaves[2].t() if low_rank else 0.0)
        goal = self._scores(self.teacher.states.double()[self.teacher.rows])
        heat = mix.kl_temperature
        cross = F.cross_entropy(self._corrected(own), self.labels, reduction="none")
        log_q, log_p = (self._corrected(side / heat).log_softmax(1) for side in (own, goal))
        kl = heat**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
        l1 = (self._corrected(own).softmax(1) - self._corrected(goal).softmax(1)).abs().sum(1)
        loss = self.weights.double() * (mix.cross_entropy * cross + mix.kl * kl + mix.l1 * l1)
        (loss.sum() / 7).backward()
        return (loss, cross, kl, l1, own.argmax(1) == self.labels), [leaf.grad for leaf in leaves]

    def _scores(self, states, extra=0.0):
        assert self.head.bias is not None
        logits = states @ self.head.weight.double().t() + extra + self.head.bias.double()
        cap = self.head.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _corrected(self, scores):
        return scores if self.head.correction is None else scores + self.head.correction.double()


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("low_rank", [False, True])
def test_losses_and_gradients_equal_full_float64_logits(name, softcap, correction, low_rank):
    case, mix = Case(softcap, correction), MIXES[name]
    found, gradients = case.run(mix, low_rank)
    (loss, cross, kl, l1, right), expected = case.reference(mix, low_rank)
    wanted = (cross, kl if mix.kl else torch.zeros_like(kl), l1 if mix.has_l1 else torch.zeros_like(l1))
    for got, want in zip((found.loss, found.cross_entropy, found.kl, found.l1), (loss, *wanted), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.correct, right)
    for gradient, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), want, rtol=1e-4, atol=1e-6)
    assert gradients[0][5].abs().max() == 0


def test_cross_entropy_alone_is_the_heads_own():
    case = Case(3.0)
    found, _ = case.run(Mix())
    loss, right = head_loss(case.hidden, case.head, case.labels, case.weights)
    torch.testing.assert_close(found.loss.sum(), loss)
    assert torch.equal(found.correct, right)


def test_a_further_weight_of_each_slot_reaches_the_gradient():
    case, mix, more = Case(), MIXES["all"], torch.linspace(0, 2, N)
    hidden = case.hidden.clone().requires_grad_()
    found = slot_losses(hidden, case.head, (case.labels, torch.ones(N)), mix, case.teacher)
    (found.loss * more).sum().backward()
    case.weights = more
    _, expected = case.run(mix)
    torch.testing.assert_close(hidden.grad, expected[0] * 7)


def test_the_target_itself_is_at_no_distance_and_pulls_nowhere():
    case, mix = Case(), Mix(0.0, 1.0, 2.0, 1.0)
    case.hidden = case.teacher.states[case.teacher.rows]
    found, gradients = case.run(mix)
    assert found.kl.abs().max() < 1e-5 and found.l1.abs().max() < 1e-5
    assert gradients[0].abs().max() < 1e-4


def test_bfloat16_keeps_the_gradient_close():
    case, mix = Case(dtype=torch.bfloat16), MIXES["mostly kl"]
    _, gradients = case.run(mix, low_rank=True)
    _, expected = case.reference(mix, low_rank=True)
    for gradient, want in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        assert F.cosine_similarity(gradient.double().flatten(), want.flatten(), dim=0) > 0.999


def test_no_slots_give_a_zero_that_can_be_differentiated():
    case = Case()
    hidden = case.hidden.clone().requires_grad_()
    teacher = Teacher(case.teacher.states, case.teacher.rows[:0])
    found = slot_losses(hidden[:0], case.head, (case.labels[:0], case.weights[:0]), MIXES["all"], teacher)
    found.loss.sum().backward()
    assert found.correct.shape == (0,) and hidden.grad is not None and hidden.grad.abs().max() == 0


def test_without_gradient_nothing_is_kept():
    case = Case()
    with torch.no_grad():
        found = slot_losses(case.hidden, case.head, (case.labels, case.weights), MIXES["all"], case.teacher)
    assert not found.loss.requires_grad
    torch.testing.assert_close(found.loss.double(), case.reference(MIXES["all"])[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXES)
def test_gpu_equals_the_reference(name):
    case, mix = Case(3.0, True, device="cuda"), MIXES[name]
    found, gradients = case.run(mix, low_rank=True)
    (loss, *_), expected = case.reference(mix, low_rank=True)
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-3, atol=1e-4)
    for gradient, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), want, rtol=1e-2, atol=1e-4)


def test_one_chunk_of_logits_lives_at_a_time(monkeypatch):
    living = living_chunks(monkeypatch, _distill, "_compare_for")
    Case().run(MIXES["all"])
    assert living == [1] * 4
