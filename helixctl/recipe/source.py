"""YAML text and `--set` options -> one tree of plain values, with the place of every key.

Scalars follow YAML 1.2's core schema, because PyYAML's 1.1 rules surprise: `1e-4` is a float here, `on` and `off`
are words (an option that wants true or false understands them), `3:30` is text, `010` is ten. Nothing here knows which
keys a recipe has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from helixctl.errors import Problem

Key = tuple[str | int, ...]

_PREFIX = "tag:yaml.org,2002:"
_SCALARS = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    """PyYAML's reader with the scalar rules of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's own interface)


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer; quotes words that YAML 1.1 or 1.2 would take for something else."""


for _name, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_PREFIX + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_PREFIX + _name, _pattern, _first)


@dataclass
class Source:
    """What the user wrote: plain values, the place of each key, and the mistakes found so far."""

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    """`file:line`, or the option, of every key and list item."""
    from_option: set[Key] = field(default_factory=set)
    """Keys given by `--set`."""
    problems: list[Problem] = field(default_factory=list)
    name: str = ""
    """How messages call the file."""

    def where(self, key: Key) -> str:
        """Place of `key`, or of the nearest section around it."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.places:
                return self.places[key[:end]]
        return self.name

    def set_by_option(self, key: Key) -> bool:
        """True if `--set` gave `key` or a section around it."""
        return any(key[:end] in self.from_option for end in range(1, len(key) + 1))


def dotted(key: Key) -> str:
    """`('data', 'train', 0, 'path')` -> `data.train.0.path`."""
    return ".".join(str(part) for part in key)


def write_yaml(data: Mapping[str, Any]) -> str:
    """YAML text that `read_source` and every other reader understand alike."""
    # Escapes beyond ASCII: PyYAML's own reader loses some line breaks of Unicode.
    text: str = yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=100)
    return text


def read_source(path: Path, overrides: tuple[str, ...]) -> Source:
    """Read a recipe file and lay `--set` options over it; mistakes are collected, never raised."""
    source = Source(name=str(path))
    text = _read_text(path, source)
    if text is None:
        return source
    node = _compose(text, source, source.name)
    if node is None and not source.problems:
        source.problems.append(Problem("recipe", "the file is empty", source.name, "start with `helixctl init`"))
    elif isinstance(node, yaml.MappingNode):
        source.data = _Reader(source).mapping(node, (), set())
    elif node is not None:
        fix = "begin with a section such as `run:`"
        place = f"{path}:{node.start_mark.line + 1}"
        source.problems.append(Problem("recipe", "the file holds no sections", place, fix))
    if source.data:
        for text in overrides:
            _apply_override(source, text)
    return source


def _read_text(path: Path, source: Source) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        message, fix = "there is no such file", "check the path, or write a recipe with `helixctl init MODEL DATA`"
    except IsADirectoryError:
        message, fix = "this is a folder", "name the recipe file in it"
    except UnicodeDecodeError:
        message, fix = "this is not a text file (UTF-8)", "name a recipe in YAML"
    except OSError as error:
        message, fix = f"cannot be read: {error.strerror}", "check the file's permissions"
    source.problems.append(Problem("recipe", message, source.name, fix))
    return None


def _compose(text: str, source: Source, where: str, key: str = "recipe") -> yaml.Node | None:
    """YAML text -> node tree. A syntax error becomes a problem with its line."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}" if mark and where == source.name else where
        message = f"broken YAML: {error.problem or error.context}"
    except yaml.YAMLError as error:
        place, message = where, f"broken YAML: {str(error).splitlines()[0]}"
    source.problems.append(
        Problem(key, message, place, "check indentation, quotes, tabs and brackets around this place")
    )
    return None


class _Reader:
    """Nodes -> plain values; notes places, duplicate keys and tags."""

    def __init__(self, source: Source, fixed_place: str | None = None) -> None:
        self.source = source
        self.fixed_place = fixed_place

    def place(self, node: yaml.Node) -> str:
        """`file:line` of a node, or the option it came from."""
        return self.fixed_place or f"{self.source.name}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, key: Key, open_nodes: set[int]) -> Any:
        """Plain value of any node. `open_nodes` holds the nodes around it, to catch an alias of itself."""
        if id(node) in open_nodes:
            self.problem(node, key, "an alias refers to itself", "write the value out")
            return None
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key, open_nodes)
        if isinstance(node, yaml.SequenceNode):
            inside = open_nodes | {id(node)}
            items = []
            for i, item in enumerate(node.value):
                self.source.places[(*key, i)] = self.place(item)
                items.append(self.value(item, (*key, i), inside))
            return items
        return self.scalar(node, key)

    def mapping(self, node: yaml.MappingNode, key: Key, open_nodes: set[int]) -> dict[str, Any]:
        """A section; a key that stands twice is a problem."""
        inside = open_nodes | {id(node)}
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(key_node, key, "a key must be a word", "write `name: value`")
                continue
            child = (*key, key_node.value)
            if key_node.value in result:
                first = self.source.places[child].rsplit(":", 1)[-1]
                self.problem(key_node, child, f"stands twice (first in line {first})", "keep one of the two")
                continue
            self.source.places[child] = self.place(key_node)
            result[key_node.value] = self.value(value_node, child, inside)
        return result

    def scalar(self, node: yaml.Node, key: Key) -> Any:
        """A word, number, truth value or nothing."""
        text, tag = str(node.value), node.tag.removeprefix(_PREFIX)
        if tag == "str":
            return text
        if tag == "null":
            return None
        try:
            return _convert(tag, text)
        except (ValueError, KeyError):
            self.problem(node, key, f"{node.tag} {text!r} is not understood", "write a plain value without a tag")
            return None

    def problem(self, node: yaml.Node, key: Key, message: str, fix: str) -> None:
        """Note a mistake at a node."""
        self.source.problems.append(Problem(dotted(key) or "recipe", message, self.place(node), fix))


def _convert(tag: str, text: str) -> bool | int | float:
    plain = text.replace("_", "")
    if tag == "bool":
        return {"true": True, "false": False}[text.lower()]
    if tag == "int":
        base = {"0x": 16, "0o": 8}.get(plain[:2], 10)
        return int(plain, base)
    if tag == "float":
        return float(plain.lower().replace(".inf", "inf").replace(".nan", "nan"))
    raise KeyError(tag)


def _apply_override(source: Source, text: str) -> None:
    name, equals, value = text.partition("=")
    where = f"--set {text}"
    parts = tuple(part.strip() for part in name.split("."))
    if not equals or not all(parts):
        message = f"{text!r} is not of the form KEY=VALUE"
        source.problems.append(Problem("--set", message, where, "for example --set train.steps=100"))
        return
    before = len(source.problems)
    node = _compose(value, source, where, dotted(parts))
    if len(source.problems) > before:
        return
    holder, key = _holder(source, parts, where)
    if holder is None:
        return
    for old in [k for k in source.places if k[: len(key)] == key]:
        del source.places[old]
    source.places[key] = where
    source.from_option.add(key)
    plain = None if node is None else _Reader(source, where).value(node, key, set())
    holder[key[-1]] = plain


def _holder(source: Source, parts: tuple[str, ...], where: str) -> tuple[Any, Key]:
    """The section or list that holds the last part of an option's key, made if absent; None after a problem."""
    holder: Any = source.data
    key: Key = ()
    for i, part in enumerate(parts):
        step: str | int = part
        if isinstance(holder, list):
            if not part.isdecimal() or int(part) >= len(holder):
                fix = f"use a number from 0 to {len(holder) - 1}" if holder else "the list is empty"
                source.problems.append(Problem(dotted((*key, part)), f"{dotted(key)} is a list", where, fix))
                return None, key
            step = int(part)
        elif not isinstance(holder, dict):
            message = f"{dotted(key)} is a value, not a section"
            source.problems.append(Problem(dotted((*key, part)), message, where, f"set {dotted(key)} itself"))
            return None, key
        key = (*key, step)
        if i < len(parts) - 1:
            if isinstance(holder, dict) and holder.get(part) is None:
                holder[part] = {}
            holder = holder[step]
    return holder, key
