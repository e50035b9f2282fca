"""Starting from target layers: what is copied, what that gives, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError

from helixctl.errors import ModelError
from helixctl.models.drafters.dflash import plugin
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.models.drafters.dflash.builders import make_options
from tests.tiny import SIZES, build, save_tiny, tiny_gemma2, tiny_gemma3, tiny_llama


def load(tmp_path: Any, model: Any) -> Target:
    options = TargetOptions(model=str(save_tiny(model, tmp_path / "target")))
    return Target.load(options, (0, 2), "cpu", torch.float32)


def drafter(target: Target, **values: Any) -> Any:
    model = plugin.build(make_options(**values), target.facts, target.taps, 0)
    plugin.initialise(model, target.layers, target.shared)
    return model


def test_layers_norms_and_projection_start_as_the_targets(tmp_path: Any) -> None:
    target = load(tmp_path, tiny_llama())
    model = drafter(target, num_layers=2, init_layers=[1, 3])
    for own, source in zip(model.layers, (target.layers[1], target.layers[3]), strict=True):
        for name, weight in source.named_parameters():
            torch.testing.assert_close(own.get_parameter(name).data, weight.data, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.norm.weight.data, target.shared.final_norm.weight.data, rtol=1e-5, atol=1e-6)
    last_tap = torch.randn(3, target.facts.hidden_size)
    context = model.project_features([torch.randn_like(last_tap) * 50, last_tap])
    torch.testing.assert_close(context, target.layers[1].get_submodule("input_layernorm")(last_tap))


def test_weights_that_a_target_adds_one_to_come_out_right(tmp_path: Any) -> None:
    target = load(tmp_path, build(transformers.GemmaConfig(**SIZES)))
    with pytest.raises(ModelError, match="layer 1"):
        drafter(target, num_layers=1, init_layers=[1], intermediate_size=48)
    model = drafter(target, num_layers=1, init_layers=[1])
    x = torch.randn(5, target.facts.hidden_size)
    torch.testing.assert_close(model.norm(x), target.shared.final_norm(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [tiny_gemma2, tiny_gemma3])
def test_layers_with_norms_behind_their_parts_are_refused(make: Any, tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="layer 1 also has pre_feedforward_layernorm, post_feedforward_layernorm"):
        drafter(load(tmp_path, make()), num_layers=1, init_layers=[1])


def test_no_init_layers_leaves_the_random_weights(tmp_path: Any) -> None:
    target = load(tmp_path, tiny_llama())
    fresh = plugin.build(make_options(num_layers=2), target.facts, target.taps, 0)
    started = drafter(target, num_layers=2)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), started.parameters(), strict=True))


def test_one_target_layer_is_named_for_every_drafter_layer() -> None:
    with pytest.raises(ValidationError, match="init_layers names 1 layers, num_layers is 2"):
        make_options(num_layers=2, init_layers=[1])
