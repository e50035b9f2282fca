"""Rotary tables, the norm, and the compute type."""

from __future__ import annotations

import torch

from helixctl.models.drafters._layers import RMSNorm, compute_dtype, rotary_tables, rotate
from tests.models.drafters.dflash.builders import make_model


def test_rotary_is_exact_at_position_100k_after_a_cast_of_the_model():
    model = make_model()
    positions = torch.tensor([0, 1, 99_999, 100_000])
    exact = positions.double()[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    cos, sin = model.to(torch.bfloat16).rotary(positions)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos[:, 0, :4].double(), exact.cos(), atol=2e-2, rtol=0)
    torch.testing.assert_close(sin[:, 0, 4:].double(), exact.sin(), atol=2e-2, rtol=0)
    assert torch.equal(cos, make_model().rotary(positions)[0])


def test_rotated_products_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))

    def product(i: int, j: int) -> torch.Tensor:
        tables = [rotary_tables(torch.tensor(p), 8, 10_000.0) for p in (i, j)]
        return (rotate(q, tables[0]) * rotate(k, tables[1])).sum()

    torch.testing.assert_close(product(3, 1), product(503, 501), rtol=1e-3, atol=1e-4)
    assert (product(3, 1) - product(3, 2)).abs() > 1e-3


def test_norm_works_in_float32_and_moves_its_weight():
    norm = RMSNorm(4, 1e-6)
    x = torch.tensor([[25_000.0, 1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    out = norm(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x.float() / x.float().square().mean().sqrt(), rtol=1e-5, atol=1e-7)
    out.sum().backward()
    assert norm.weight.grad is not None


def test_compute_dtype_follows_autocast():
    weight = torch.zeros(2)
    assert compute_dtype(weight) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(weight) == torch.bfloat16
