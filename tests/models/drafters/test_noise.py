"""Noise is a function of its place, of the right size and shape, and leaves no trace on any generator."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from helixctl.models.drafters._noise import add_noise
from helixctl.models.drafters._options import FeatureNoise

SHAPE = (2, 300, 64)


def features(num_taps: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(SHAPE, generator=generator) * 10.0**i).to(dtype) for i in range(num_taps)]


def noise(
    kind: Literal["uniform", "gaussian"], scale: float = 0.5, seed: int = 3, number: int = 7
) -> list[torch.Tensor]:
    """What is added, relative to each token's mean absolute value."""
    taps = features()
    noisy = add_noise(taps, FeatureNoise(kind=kind, scale=scale), seed, torch.tensor(number))
    return [(y - x) / x.abs().mean(-1, keepdim=True) for x, y in zip(taps, noisy, strict=True)]


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_size_shape_and_independence(kind):
    one, two = noise(kind)
    for x in (one, two):
        assert abs(x.mean()) < 0.01
        assert abs(x.std() - 0.5) < 0.01
    drawn = one.flatten() / 0.5
    if kind == "uniform":
        assert drawn.abs().max() <= 3**0.5 * 1.0001
        counts = torch.histc(drawn, 20, -(3**0.5), 3**0.5)
        assert (counts / counts.mean() - 1).abs().max() < 0.1
    else:
        for edge, share in ((1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)):
            assert abs((drawn.abs() < edge).float().mean() - share) < 0.01
    across_taps = np.corrcoef(one.flatten(), two.flatten())[0, 1]
    across_tokens = np.corrcoef(one[:, 1:].flatten(), one[:, :-1].flatten())[0, 1]
    across_channels = np.corrcoef(one[..., 1:].flatten(), one[..., :-1].flatten())[0, 1]
    across_rows = np.corrcoef(one[0].flatten(), one[1].flatten())[0, 1]
    assert max(abs(c) for c in (across_taps, across_tokens, across_channels, across_rows)) < 0.03


def test_it_is_a_function_of_seed_and_number_alone():
    state = torch.random.get_rng_state()
    first, again = noise("gaussian"), noise("gaussian")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    for other in (noise("gaussian", seed=4), noise("gaussian", number=8)):
        assert abs(np.corrcoef(first[0].flatten(), other[0].flatten())[0, 1]) < 0.03


@pytest.mark.parametrize("options", [FeatureNoise(), FeatureNoise(kind="uniform", scale=0.0)])
def test_no_noise_is_no_change(options):
    taps = features()
    assert all(x is y for x, y in zip(taps, add_noise(taps, options, 0, None), strict=True))


def test_type_and_zeros_stay():
    taps = [*features(1, torch.bfloat16), torch.zeros(SHAPE, dtype=torch.bfloat16)]
    noisy = add_noise(taps, FeatureNoise(kind="gaussian"), 0, None)
    assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in noisy)
    assert not torch.equal(noisy[0], taps[0]) and torch.equal(noisy[1], taps[1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_gpu_draws_the_same_without_waiting_or_recompiling(kind):
    options, taps = FeatureNoise(kind=kind), features()
    on_gpu = [tap.cuda() for tap in taps]
    number = torch.tensor(5, device="cuda")
    add_noise(on_gpu, options, 3, number)
    torch.compiler.set_stance("fail_on_recompile")
    try:
        torch.cuda.set_sync_debug_mode("error")
        number.fill_(6)
        noisy = add_noise(on_gpu, options, 3, number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.compiler.set_stance("default")
    for got, want in zip(noisy, add_noise(taps, options, 3, torch.tensor(6)), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
