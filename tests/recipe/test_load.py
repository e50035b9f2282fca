"""Recipes: every mistake at once, with place and fix; paths; round trip; schema."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from helixctl.errors import Problem, RecipeError
from helixctl.plugins import DRAFTERS, plugin_names
from helixctl.recipe.causal_lm import CausalLMRecipe
from helixctl.recipe.load import dump_recipe, load_recipe, locate, recipe_schema
from helixctl.recipe.schema import DataOptions, Recipe
from tests.conftest import ROOT

ALGORITHM = plugin_names(DRAFTERS)[0]
GOOD = f"""\
run:
  dir: runs/a
target:
  model: org/name
data:
  train:
    - path: a.jsonl
  store: store
drafter:
  algorithm: {ALGORITHM}
  mask_token_id: 3
train:
  steps: 10
"""


@pytest.fixture
def recipe_file(tmp_path: Path):
    def write(text: str = GOOD) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def mistakes(path: Path, *overrides: str) -> dict[str, Problem]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return {problem.key: problem for problem in caught.value.problems}


def test_paths_start_at_the_files_folder(recipe_file):
    path = recipe_file()
    recipe = load_recipe(path)
    assert recipe.run.dir == path.parent / "runs/a"
    assert recipe.data.store == path.parent / "store"
    assert recipe.data.train[0].path == path.parent / "a.jsonl"
    assert recipe.target.model == "org/name"
    assert recipe.drafter.algorithm == ALGORITHM
    assert recipe.drafter.mask_token_id == 3


def test_paths_given_by_option_start_at_the_current_folder(recipe_file, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    recipe = load_recipe(recipe_file(), ["run.dir=mine", "data.train=[{path: b.jsonl}]"])
    assert recipe.run.dir == here / "mine"
    assert recipe.data.train[0].path == here / "b.jsonl"


def test_a_dataset_is_a_hub_name_or_a_folder_in_place_of_a_path(recipe_file, tmp_path):
    train = "data.train=[{dataset: {name: owner/set, split: test}, format: text}]"
    source = load_recipe(recipe_file(), [train]).data.train[0]
    assert (source.path, source.label, source.place) == (None, "set test", "owner/set[test]")
    (tmp_path / "owner/set").mkdir(parents=True)
    text = recipe_file().read_text().replace("path: a.jsonl", "dataset: {name: owner/set}")
    assert load_recipe(recipe_file(text)).data.train[0].place == f"{tmp_path}/owner/set[train]"


@pytest.mark.parametrize("train", ["[{format: text}]", "[{path: a, dataset: {name: b}}]"])
def test_a_source_is_either_files_or_a_dataset(recipe_file, train):
    found = mistakes(recipe_file(), f"data.train={train}")
    assert {key: problem.message for key, problem in found.items()} == {
        "data.train.0": "should have either `path` or `dataset`"
    }


def test_the_sources_of_the_page_about_data_are_valid():
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    data = DataOptions.model_validate(yaml.safe_load(block)["data"])
    labels = [source.label for source in data.train]
    assert labels == ["chats.jsonl", "drills", "notes.parquet", "ultrachat_200k train_sft", "src"]


def test_a_model_that_exists_is_a_folder(recipe_file, tmp_path):
    (tmp_path / "org/name").mkdir(parents=True)
    assert load_recipe(recipe_file()).target.model == str(tmp_path / "org/name")


def test_environment_variables_are_expanded_in_paths_only(recipe_file, monkeypatch):
    monkeypatch.setenv("PLACE", "/somewhere")
    text = GOOD.replace("runs/a", "${PLACE}/run").replace("org/name", "$PLACE/model")
    recipe = load_recipe(recipe_file(text + "checkpoint: {best: $PLACE}\n"))
    assert recipe.run.dir == Path("/somewhere/run")
    assert recipe.target.model == "/somewhere/model"
    assert recipe.checkpoint.best == "$PLACE"


def test_an_unset_variable_is_named(recipe_file, monkeypatch):
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    found = mistakes(recipe_file(GOOD.replace("store: store", "store: $NOT_SET_ANYWHERE/s")))
    assert "NOT_SET_ANYWHERE is not set" in found["data.store"].message
    assert found["data.store"].where.endswith(":8")


def test_all_mistakes_are_told_at_once_with_lines(recipe_file):
    path = recipe_file(
        GOOD.replace("model: org/name", "modle: x")
        .replace("mask_token_id: 3", "mask_token_id: 3\n  block_sise: 4")
        .replace("steps: 10", "steps: 3:30\n  seq_len: 5\n  learning_rate: 1e-4x\n  steps: 4")
        + "pipeline: {slots: 0}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert [(p.key, int(p.where.rsplit(":", 1)[1])) for p in caught.value.problems] == [
        ("target.model", 3),
        ("target.modle", 4),
        ("drafter.block_sise", 12),
        ("train.steps", 14),
        ("train.seq_len", 15),
        ("train.learning_rate", 16),
        ("train.steps", 17),
        ("pipeline.slots", 18),
    ]
    found = {problem.key: problem for problem in caught.value.problems}
    assert found["target.modle"].fix == "did you mean 'model'?"
    assert found["drafter.block_sise"].fix == "did you mean 'block_size'?"
    assert found["train.seq_len"].fix == "did you mean `data.seq_len`?"
    assert "'auto' or" in found["pipeline.slots"].message


@pytest.mark.parametrize(
    ("old", "new", "key", "words", "fix"),
    [
        ("steps: 10", "steps: 10\n  epochs: 2", "train.steps", "train.epochs is given too", "--set train.epochs=null"),
        ("train:\n  steps: 10\n", "", "train", "neither epochs nor steps", "add `steps: 1000`"),
        ("mask_token_id: 3", "x_y: 3", "drafter.mask_token_id", "is required", "add it"),
        ("- path: a.jsonl", "path: a.jsonl", "data.train", "should be a list", "begin each entry with `- `"),
        ("- path: a.jsonl", "[]", "data.train", "at least 1", None),
        (
            "- path: a.jsonl",
            "- path: a.jsonl\n      format: chta",
            "data.train.0.format",
            "there is no 'chta'",
            "'chat'",
        ),
        ("steps: 10", "steps: 10\n  schedule: cosin", "train.schedule", "'cosin'", "did you mean 'cosine'?"),
        ("steps: 10", "steps: 10\n  warmup_ratio: 2", "train.warmup_ratio", "less than or equal to 1", None),
        (f"algorithm: {ALGORITHM}", "num_layers: 2", "drafter.algorithm", "is required", ALGORITHM),
        (f"algorithm: {ALGORITHM}", "algorithm: nothing_like_it", "drafter.algorithm", "among the drafters", ALGORITHM),
        (
            f"algorithm: {ALGORITHM}",
            f"algorithm: {ALGORITHM}\n  block_size: 4096",
            "drafter.block_size",
            "a row has",
            "smaller",
        ),
        ("run:\n  dir: runs/a", "run: 5", "run", "should be a section", None),
        ("run:\n  dir: runs/a\n", "", "run", "is required", "with dir"),
        ("model: org/name", "model: org/name\n  compile: true", "target.compile", "is true", "write on"),
        ("store: store", "store: ''", "data.store", "is empty", "write a path"),
    ],
)
def test_a_mistake_is_named_with_a_fix(recipe_file, old, new, key, words, fix):
    assert old in GOOD
    found = mistakes(recipe_file(GOOD.replace(old, new, 1)))
    assert words in found[key].message
    assert fix is None or fix in str(found[key].fix)


def test_unknown_sink_is_suggested(recipe_file):
    found = mistakes(recipe_file(GOOD + "metrics: {sinks: [consol]}\n"))
    assert found["metrics.sinks.0"].fix == "did you mean 'console'?"


def test_a_drafter_that_is_no_section(recipe_file):
    text = GOOD[: GOOD.index("drafter:")] + "drafter: 5\ntrain: {steps: 1}\n"
    assert "should be a section" in mistakes(recipe_file(text))["drafter"].message


def test_mistakes_in_options_name_the_option(recipe_file):
    found = mistakes(recipe_file(), "train.foo=1", "drafter.num_layers=none")
    assert found["train.foo"].where == "--set train.foo=1"
    assert found["drafter.num_layers"].where == "--set drafter.num_layers=none"


def test_an_option_can_take_a_value_away(recipe_file):
    recipe = load_recipe(recipe_file(), ["train.steps=null", "train.epochs=2"])
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2)


def test_floats_and_words_are_what_they_look_like(recipe_file):
    text = GOOD.replace("steps: 10", "steps: 10\n  learning_rate: 1e-4")
    text = text.replace("store: store", "store: store\n  packing: off").replace("name", "name\n  compile: off", 1)
    recipe = load_recipe(recipe_file(text))
    assert recipe.train.learning_rate == 1e-4
    assert recipe.data.packing is False
    assert recipe.target.compile == "off"


def test_later_checks_get_their_place(recipe_file):
    path = recipe_file()
    error = RecipeError([Problem("drafter.mask_token_id", "bad"), Problem("pipeline.slots", "bad", fix="x")])
    first, second = locate(error, path, ["pipeline.slots=1"]).problems
    assert first.where == f"{path}:11"
    assert second == Problem("pipeline.slots", "bad", "--set pipeline.slots=1", "x")


@settings(max_examples=20)
@given(
    learning_rate=st.floats(min_value=1e-12, max_value=1e6),
    seed=st.integers(min_value=0, max_value=2**40),
    compile_=st.sampled_from(["auto", "on", "off"]),
    taps=st.none() | st.lists(st.integers(0, 40), min_size=1, max_size=4),
    best=st.text(st.characters(exclude_categories=("C", "Z")), max_size=12)
    | st.sampled_from(["1e5", "on", "3:30", "null"]),
)
def test_dump_loads_back_equal(tmp_path_factory, learning_rate, seed, compile_, taps, best):
    path = tmp_path_factory.getbasetemp() / "dump.yaml"
    path.write_text(GOOD, encoding="utf-8")
    options = [f"train.learning_rate={learning_rate!r}", f"run.seed={seed}", f"target.compile={compile_}"]
    options += [
        f"drafter.target_layer_ids={json.dumps(taps)}",
        f"checkpoint.best={json.dumps(best, ensure_ascii=False)}",
    ]
    recipe = load_recipe(path, options)
    assert recipe.checkpoint.best == best
    other = tmp_path_factory.getbasetemp() / "other" / "r.yaml"
    other.parent.mkdir(exist_ok=True)
    other.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(other) == recipe


def test_schema_is_json_and_knows_every_algorithm():
    schema = json.loads(json.dumps(recipe_schema()))
    kinds: dict[str, type[BaseModel]] = {"drafter": Recipe, "causal_lm": CausalLMRecipe}
    assert {choice["$ref"].rsplit("/", 1)[1] for choice in schema["oneOf"]} == set(kinds)
    for kind, model in kinds.items():
        assert set(schema["$defs"][kind]["properties"]) == set(model.model_fields)
    assert "kind" in schema["$defs"]["causal_lm"]["required"]
    drafter = schema["$defs"]["drafter"]["properties"]["drafter"]
    names = {choice["$ref"].rsplit("/", 1)[1] for choice in drafter["oneOf"]}
    assert names == set(plugin_names(DRAFTERS))
    for name in names:
        assert schema["$defs"][name]["properties"]["algorithm"]["const"] == name
    assert set(_references(schema)) <= {f"#/$defs/{name}" for name in schema["$defs"]}


def _references(schema):
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref":
                yield value
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)
