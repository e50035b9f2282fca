"""The recipes of causal LMs have the sizes that their names say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helixctl.lm_plan import make_lm_plan
from helixctl.machine import Machine
from helixctl.recipe.causal_lm import CausalLMRecipe
from helixctl.recipe.load import load_any_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
GPT2_AND_CHAT = 50257 + 8
"""Length of HelixTokenizer("gpt2")."""


@pytest.mark.parametrize(("name", "least", "most"), [("helix-87m", 87.0e6, 88.0e6), ("helix-400m", 399.5e6, 400.5e6)])
def test_parameters_are_those_of_the_name_with_a_tied_head(
    name: str, least: float, most: float, tmp_path: Path
) -> None:
    recipe = load_any_recipe(RECIPES / f"{name}.yaml", [f"data.store={tmp_path / 'none'}"])
    assert isinstance(recipe, CausalLMRecipe) and isinstance(recipe.model.config, dict)
    config = transformers.AutoConfig.for_model(**recipe.model.config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    exact = sum(parameter.numel() for parameter in model.parameters())
    assert least <= exact <= most
    plan = make_lm_plan(recipe, Machine(num_cpus=2, total_memory_bytes=64 << 30))
    assert plan.parameters == exact, "the plan counts without torch"
    assert GPT2_AND_CHAT <= config.vocab_size < GPT2_AND_CHAT + 64 and config.vocab_size % 64 == 0
