"""YAML with places: scalars of YAML 1.2, duplicates, broken files, `--set`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixctl.recipe.source import Source, read_source, write_yaml


def read(path: Path, text: str, *overrides: str) -> Source:
    path.write_text(text, encoding="utf-8")
    return read_source(path, overrides)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("6.0e-4", 6e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("3:30", "3:30"),
        ("010", 10),
        ("0x10", 16),
        ("1_000", 1000),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!str 5", "5"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars_follow_yaml_1_2(tmp_path, text, value):
    source = read(tmp_path / "r.yaml", f"a: {text}\n")
    assert source.problems == []
    assert source.data == {"a": value}
    assert type(source.data["a"]) is type(value)


def test_every_key_has_its_line(tmp_path):
    path = tmp_path / "r.yaml"
    source = read(path, "a:\n  b: 1\n  c:\n    - x: 2\n    - x: 3\n")
    assert source.where(("a", "c", 1, "x")) == f"{path}:5"
    assert source.where(("a", "missing")) == f"{path}:1"
    assert source.where(("nowhere",)) == str(path)


def test_a_key_that_stands_twice_is_a_problem(tmp_path):
    source = read(tmp_path / "r.yaml", "a: {x: 1}\nb: 2\na: 3\n")
    (problem,) = source.problems
    assert (problem.key, problem.message) == ("a", "stands twice (first in line 1)")
    assert problem.where.endswith("r.yaml:3")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: [1, 2\n", 3, "broken YAML"),
        ("a: 1\n\tb: 2\n", 2, "broken YAML"),
        ("a: 'x\n", 2, "broken YAML"),
        ("a: *nothing\n", 1, "undefined alias"),
        ("a: &x [*x]\n", 1, "refers to itself"),
        ("a: !!python/object:os.system 1\n", 1, "is not understood"),
        ("a: !!int x\n", 1, "is not understood"),
        ("? [1]\n: 2\n", 1, "a key must be a word"),
        ("- a\n- b\n", 1, "holds no sections"),
        ("just words\n", 1, "holds no sections"),
        ("a: 1\n---\na: 2\n", 2, "another document"),
    ],
)
def test_broken_files_name_the_line(tmp_path, text, line, message):
    (problem,) = read(tmp_path / "r.yaml", text).problems
    assert message in problem.message
    assert problem.where.endswith(f"r.yaml:{line}")


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_an_empty_file_is_a_problem(tmp_path, text):
    (problem,) = read(tmp_path / "r.yaml", text).problems
    assert problem.message == "the file is empty"


def test_missing_file_folder_and_binary(tmp_path):
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    messages = [read_source(path, ()).problems[0].message for path in (tmp_path / "no", tmp_path, tmp_path / "b.yaml")]
    assert messages == ["there is no such file", "this is a folder", "this is not a text file (UTF-8)"]


def test_options_replace_values_and_make_sections(tmp_path):
    source = read(
        tmp_path / "r.yaml",
        "a: {b: 1}\nl: [{x: 1}]\n",
        "a.b=2e-3",
        "new.deep.key=[1, two]",
        "l.0.x=off",
        "a.c=",
        "a.b=3",
    )
    assert source.problems == []
    assert source.data == {"a": {"b": 3, "c": None}, "l": [{"x": "off"}], "new": {"deep": {"key": [1, "two"]}}}
    assert source.where(("new", "deep", "key")) == "--set new.deep.key=[1, two]"
    assert source.set_by_option(("l", 0, "x")) and not source.set_by_option(("l", 0))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("novalue", "not of the form KEY=VALUE"),
        ("=1", "not of the form KEY=VALUE"),
        ("a..b=1", "not of the form KEY=VALUE"),
        ("a.b=[1", "broken YAML"),
        ("a.b.c=1", "a.b is a value, not a section"),
        ("l.3=1", "l is a list"),
        ("l.x=1", "l is a list"),
    ],
)
def test_a_bad_option_is_named(tmp_path, option, message):
    (problem,) = read(tmp_path / "r.yaml", "a: {b: 1}\nl: [1]\n", option).problems
    assert message in problem.message
    assert problem.where == f"--set {option}"


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(data=st.dictionaries(st.text(min_size=1, max_size=5), trees, min_size=1, max_size=3))
def test_what_yaml_writes_is_read_back(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    source = read(path, write_yaml(data))
    assert source.problems == []
    assert source.data == data
