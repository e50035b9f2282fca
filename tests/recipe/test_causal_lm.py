"""Recipes of causal LMs: stages, their documents, paths; mistakes with place and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixctl.errors import RecipeError
from helixctl.recipe.causal_lm import CausalLMRecipe, data_sections, stage_data
from helixctl.recipe.load import dump_recipe, load_any_recipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]
GOOD = """\
kind: causal_lm
run: {dir: runs/lm}
model:
  tokenizer: gpt2
  config: {model_type: llama, hidden_size: 64, vocab_size: 128}
data:
  train: [{path: text, format: text}]
  store: store
  seq_len: 64
  max_dropped: 0.9
stages:
  - {epochs: 2, learning_rate: 1.0e-3}
  - tokens: 1.0e6
    optimizer: fresh
    data: {train: [{path: $CHATS, format: chat}], store: chat-store}
"""


@pytest.fixture(autouse=True)
def chats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATS", "chats.jsonl")


def load(folder: Path, text: str = GOOD, *overrides: str) -> CausalLMRecipe:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    recipe = load_any_recipe(path, overrides)
    assert isinstance(recipe, CausalLMRecipe)
    return recipe


def problems(folder: Path, text: str = GOOD, *overrides: str) -> dict[str, tuple[str, str, str | None]]:
    with pytest.raises(RecipeError) as caught:
        load(folder, text, *overrides)
    return {p.key: (p.message, p.where, p.fix) for p in caught.value.problems}


def test_a_stage_replaces_documents_and_keeps_the_rest(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    assert stage_data(recipe, 0) == recipe.data
    chat = stage_data(recipe, 1)
    assert (chat.store, chat.train[0].path) == (tmp_path / "chat-store", tmp_path / "chats.jsonl")
    assert (chat.seq_len, chat.max_dropped) == (64, 0.9)
    assert data_sections(recipe) == (recipe.data, chat)
    assert recipe.stages[1].tokens == 1_000_000


def test_tokenizers_and_checkpoints_are_names_or_folders(tmp_path: Path) -> None:
    assert load(tmp_path).model.tokenizer == "gpt2"
    (tmp_path / "gpt2").mkdir()
    assert load(tmp_path).model.tokenizer == str(tmp_path / "gpt2")
    from_weights = load(tmp_path, GOOD, "model.config=null", "model.checkpoint=./weights", "model.tokenizer=null")
    assert from_weights.model.tokenizer_base.endswith("/weights")
    in_a_file = load(tmp_path, GOOD.replace("{model_type: llama, hidden_size: 64, vocab_size: 128}", "model.json"))
    assert in_a_file.model.config == tmp_path / "model.json"


def test_dump_loads_back_equal(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    (tmp_path / "other").mkdir()
    assert load(tmp_path / "other", dump_recipe(recipe)) == recipe


def test_the_recipe_of_the_page_is_one(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "causal-lm.md").read_text(encoding="utf-8")
    recipe = load(tmp_path, page.split("```yaml\n")[1].split("```")[0])
    assert [data.train[0].format for data in data_sections(recipe)] == ["text", "chat"]


def test_defaults_suit_language_models(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    assert (recipe.checkpoint.best, recipe.train.weight_decay) == ("val/loss", 0.1)


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["stages.0.epochs=null"], "stages.0", "none of epochs, steps and tokens"),
        (["stages.0.steps=5"], "stages.0", "epochs and steps are given"),
        (["stages.0.optimizer=fresh"], "stages.0.optimizer", "begins with a fresh optimizer"),
        (["model.config=null"], "model", "neither config nor checkpoint"),
        (["model.checkpoint=a/b"], "model", "both config and checkpoint"),
        (["model.tokenizer=null"], "model.tokenizer", "is required with a config"),
        (["model.config={hidden_size: 3}"], "model.config", "has no model_type"),
        (["data.stride=5"], "data.stride", "no meaning with packing continuous"),
        (["data.packing=document", "data.stride=65"], "data.stride", "would leave tokens out"),
        (["stages.1.data.store=store"], "stages.1.data.store", "the store of other documents too"),
        (["stages.1.data.train=[{path: x, format: chta}]"], "stages.1.data.train.0.format", "there is no 'chta'"),
        (["train.learning_rate=1"], "train.learning_rate", "unknown key"),
        (["data.packing=true"], "data.packing", "it should be 'continuous' or 'document'"),
    ],
)
def test_mistakes_are_told_with_key_place_and_fix(tmp_path: Path, overrides: list[str], key: str, message: str) -> None:
    if overrides == ["stages.1.data.store=store"]:  # relative to the current folder, the recipe's to its own
        overrides = [f"stages.1.data.store={tmp_path / 'store'}"]
    found = problems(tmp_path, GOOD, *overrides)
    assert set(found) == {key} or key in found
    told, where, fix = found[key]
    assert message in told and where and fix


def test_a_misplaced_option_is_sent_where_it_belongs(tmp_path: Path) -> None:
    _, where, fix = problems(tmp_path, GOOD + "train: {learning_rate: 1.0e-3}\n")["train.learning_rate"]
    assert where.endswith("recipe.yaml:16") and fix and "stages.0.learning_rate" in fix


def test_commands_for_drafters_refuse_the_kind(tmp_path: Path) -> None:
    load(tmp_path)
    with pytest.raises(RecipeError, match="only drafters"):
        load_recipe(tmp_path / "recipe.yaml")
