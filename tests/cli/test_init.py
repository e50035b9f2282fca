"""`init`: the recipe it writes loads, plans and prepares; how formats and mask tokens are found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helixctl.cli.peek import TokenizerPeek, choose_mask_token, peek_data, peek_tokenizer
from helixctl.errors import DataError, UsageError
from helixctl.models.facts import read_target_facts
from helixctl.recipe.load import load_recipe
from helixctl.recipe.schema import TargetOptions
from tests.data.templates import byte_tokenizer

UNKNOWN = TokenizerPeek(None, {}, "", None)
CHAT = {"messages": [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "general " * 8}]}


@pytest.fixture
def data(tmp_path):
    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def tokenizer(model):
    byte_tokenizer().save_pretrained(model)
    return peek_tokenizer(str(model))


def test_what_it_writes_loads_plans_and_prepares(run, tmp_path, model, tokenizer, data):
    path, output = data([CHAT] * 30 + [{**CHAT, "n": i} for i in range(5)]), tmp_path / "out" / "r.yaml"
    done = run("init", model, path, "-o", output)
    assert done.code == 0, done.err
    assert f"wrote {output}" in done.out
    recipe = load_recipe(output)
    assert recipe.target.model == str(model)
    assert recipe.data.train[0].path == path
    assert recipe.data.seq_len == 128
    assert recipe.drafter.target_layer_ids is not None
    assert recipe.drafter.mask_token_id == tokenizer.length
    assert run("plan", output).code == 0
    done = run("prepare", output, "--show", "1", "--set", "data.workers=0", "--set", "data.validation.fraction=0")
    assert done.code == 0, done.err
    assert "general general" in done.out
    assert "«" in done.out


def test_a_file_is_replaced_only_by_force(run, tmp_path, model, tokenizer, data):
    output = tmp_path / "r.yaml"
    output.write_text("mine", encoding="utf-8")
    path = data([CHAT])
    done = run("init", model, path, "-o", output)
    assert done.code == 2
    assert output.read_text() == "mine"
    assert run("init", model, path, "-o", output, "--force").code == 0


def test_paths_near_the_recipe_are_relative(run, tmp_path, model, tokenizer, data, monkeypatch):
    data([CHAT])
    monkeypatch.chdir(tmp_path)
    assert run("init", "model", "data.jsonl").code == 0
    text = (tmp_path / "recipe.yaml").read_text()
    assert "model: model\n" in text
    assert "path: data.jsonl\n" in text


@pytest.mark.parametrize(
    ("rows", "format_", "field"),
    [
        ([CHAT], "chat", None),
        ([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}], "chat", None),
        ([{"dialog": CHAT["messages"]}], "chat", "dialog"),
        ([{"text": "some words"}], "text", None),
        ([{"id": 5, "body": "some words"}], "text", "body"),
        ([{"input_ids": [1, 2], "loss_mask": [0, 1]}], "tokens", None),
    ],
)
def test_formats_are_recognised(data, rows, format_, field):
    found = peek_data(data(rows), UNKNOWN)
    assert (found.format, found.field) == (format_, field)


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("word " * 700, encoding="utf-8")
    found = peek_data(path, UNKNOWN)
    assert found.format == "text"
    assert found.lengths == (1008,)
    assert not found.counted


def test_lengths_are_counted_with_the_tokenizer(data, tokenizer):
    found = peek_data(data([{"text": "x" * n} for n in range(1, 101)]), tokenizer)
    assert found.counted
    assert found.long_length == 96 + 8


def test_data_that_nothing_understands_names_its_keys(data):
    with pytest.raises(DataError, match="their keys are a, b"):
        peek_data(data([{"a": 1, "b": [2]}]), UNKNOWN)
    with pytest.raises(UsageError, match="there is no"):
        peek_data(data([]).with_name("none"), UNKNOWN)


@pytest.mark.parametrize(
    ("special", "template", "texts", "expected"),
    [
        ({3: "<a>", 4: "<b>"}, "", (), 4),
        ({3: "<a>", 4: "<b>"}, "uses <b>", (), 3),
        ({3: "<a>", 4: "<b>"}, "", ("text with <b>",), 3),
        ({3: "<|reserved_1|>", 4: "<b>"}, "", (), 3),
        ({0: "<pad>", 2: "<end>", 4: "<unk>"}, "", (), None),
        ({}, "", (), None),
    ],
)
def test_without_free_rows_an_unused_special_token_is_the_mask(model, special, template, texts, expected):
    facts = read_target_facts(TargetOptions(model=str(model)))
    found = choose_mask_token(facts, TokenizerPeek(facts.vocab_size, special, template, None), texts)
    assert (found.id if found else None) == expected


def test_a_free_row_of_the_embedding_is_the_mask_where_there_is_one(model):
    facts = read_target_facts(TargetOptions(model=str(model)))
    found = choose_mask_token(replace(facts, vocab_size=151936), TokenizerPeek(151669, {3: "<a>"}, "", None), ())
    assert found is not None and found.id == 151669


def test_a_model_without_a_tokenizer_is_refused(run, tmp_path, model, data):
    done = run("init", model, data([CHAT]), "-o", tmp_path / "r.yaml")
    assert done.code == 1
    assert "no token was found" in done.err
    assert not (tmp_path / "r.yaml").exists()
