from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helixctl.models.proof import prove_capture
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.tiny import save_tiny, tiny_gemma2, tiny_gemma3, tiny_llama


def load(model: Any, folder: Any, taps: tuple[int, ...] = (0, 2, 3), dtype: torch.dtype = torch.float32) -> Target:
    return Target.load(TargetOptions(model=str(save_tiny(model, folder))), taps, "cpu", dtype)


@pytest.mark.parametrize("builder", [tiny_llama, tiny_gemma3, tiny_gemma2])
def test_a_sound_target_is_proven_and_stays_usable(builder: Callable[[], Any], tmp_path: Any) -> None:
    target = load(builder(), tmp_path)
    ids = torch.arange(3, 33)
    for _ in range(2):
        proof = prove_capture(target, ids)
        assert proof.holds
        assert max(*proof.taps, proof.logits, proof.embedding) < 1e-5
        assert min(proof.neighbours) > 1e-2


def test_a_forgotten_final_norm_shows_in_the_logits(tmp_path: Any) -> None:
    target = load(tiny_llama(), tmp_path)
    object.__setattr__(target.shared, "final_norm", torch.nn.Identity())
    assert not prove_capture(target, torch.arange(3, 33)).holds


def test_a_tap_one_layer_off_shows(tmp_path: Any) -> None:
    target = load(tiny_llama(), tmp_path, taps=(1, 2))
    target.taps = (2, 1)  # each state now claims the other's layer
    proof = prove_capture(target, torch.arange(3, 33))
    assert max(proof.taps) < 1e-5  # taps only name hooks; the order follows
    hidden = target.features
    target.features = lambda *a, **k: [*hidden(*a, **k)[1::-1], *hidden(*a, **k)[2:]]  # type: ignore[method-assign]
    assert not prove_capture(target, torch.arange(3, 33)).holds


@pytest.mark.parametrize("builder", [tiny_llama, tiny_gemma3])
def test_bfloat16_shares_the_models_own_rounding_of_the_embedding_scale(
    builder: Callable[[], Any], tmp_path: Any
) -> None:
    target = load(builder(), tmp_path, dtype=torch.bfloat16)
    proof = prove_capture(target, torch.arange(3, 33))
    assert proof.embedding == 0.0
    assert proof.holds
