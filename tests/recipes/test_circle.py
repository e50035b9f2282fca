"""The pair of recipes of the whole circle: what the first makes is what the second expects."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixctl.recipe.causal_lm import CausalLMRecipe
from helixctl.recipe.load import load_any_recipe, load_recipe
from helixctl.recipe.schema import DrafterOptions

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 8000
"""As scripts/circle asks scripts/make_tokenizer.py for."""


def test_the_drafter_is_for_the_model_that_the_circle_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_TEXT", str(tmp_path))
    lm = load_any_recipe(ROOT / "recipes/circle-lm.yaml")
    drafter = load_recipe(ROOT / "recipes/circle-drafter.yaml")
    script = (ROOT / "scripts/circle").read_text(encoding="utf-8")
    assert isinstance(lm, CausalLMRecipe) and isinstance(lm.model.config, dict)
    assert f"--output {Path(drafter.target.model).relative_to(ROOT)}" in script
    assert f"--vocab-size {VOCAB_SIZE}" in script
    options: DrafterOptions = drafter.drafter
    with_chat = VOCAB_SIZE + 8
    assert with_chat <= options.mask_token_id < lm.model.config["vocab_size"], "a row that no token uses"
    assert lm.data.train == drafter.data.train
    assert lm.data.validation == drafter.data.validation, "what is held out from the model is held out from the drafter"
