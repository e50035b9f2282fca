"""Turns pydantic's errors into problems that name the key the user wrote, its place and a fix."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from helixctl.errors import Problem
from helixctl.plugins import suggest
from helixctl.recipe.source import Key, Source, dotted


@dataclass(frozen=True)
class Checked:
    """A part of the recipe that was checked against `model` and stands at key `at`."""

    source: Source
    model: type[BaseModel]
    at: Key = ()
    homes: tuple[str, ...] = ()
    """Dotted names of every key of a recipe, to find where a misplaced one belongs."""

    def value(self, key: Key) -> Any:
        """What the user wrote at `key`, relative to `at`."""
        value: Any = self.source.data
        for part in (*self.at, *key):
            value = value[part]
        return value


def explain(error: ValidationError, checked: Checked) -> list[Problem]:
    """One problem per key, in the order of pydantic's list."""
    grouped: dict[Key, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        if item["type"] == "too_short" and len(item["input"]) >= item.get("ctx", {}).get("min_length", 0):
            continue  # its entries are wrong, which is told of each
        grouped.setdefault(_written_key(item, checked.value(())), []).append(item)
    return [_problem(key, items, checked) for key, items in grouped.items()]


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of every option in a section, list items left out."""
    for name, info in model.model_fields.items():
        yield prefix + name
        section = _section_in(info.annotation)
        if section is not None and not _is_list(info.annotation):
            yield from all_keys(section, f"{prefix}{name}.")


def _is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (tuple, list)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `tuple[SourceOptions, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(argument) for argument in typing.get_args(annotation))
    return next((section for section in found if section is not None), None)


def _section_at(model: type[BaseModel], key: Key) -> type[BaseModel] | None:
    section: type[BaseModel] | None = model
    for part in key:
        if isinstance(part, str) and section is not None:
            info = section.model_fields.get(part)
            section = _section_in(info.annotation) if info else None
    return section


def _written_key(item: ErrorDetails, data: Any) -> Key:
    """The error's location without what pydantic adds: union members and tags are no keys of the user's."""
    key: Key = ()
    for i, part in enumerate(item["loc"]):
        if part in (data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()):
            data = data[part]
        elif not (item["type"] == "missing" and i == len(item["loc"]) - 1):
            continue
        key = (*key, part)
    return key


def _problem(key: Key, items: list[ErrorDetails], checked: Checked) -> Problem:
    """Errors of one key; several are the members of a union, and any of them would do."""
    told = [_tell(item, key, checked) for item in items]
    messages = list(dict.fromkeys(message for message, _ in told))
    first, *rest = messages
    rest = [message.split("; ", 1)[-1].removeprefix("it should be ") for message in rest]
    fix = next((fix for _, fix in told if fix), None)
    full = (*checked.at, *key)
    return Problem(dotted(full) or "recipe", " or ".join([first, *rest]), checked.source.where(full), fix)


def _tell(item: ErrorDetails, key: Key, checked: Checked) -> tuple[str, str | None]:
    """Message and fix of one error."""
    kind, value = item["type"], item["input"]
    if kind == "missing":
        return "is required", f"add it: {_description(key, checked)}"
    if kind == "extra_forbidden":
        return "unknown key", _nearest(key, checked)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return (
            f"should be a section of `name: value` lines, not {_short(value)}",
            "write its options below it, indented",
        )
    if kind in ("tuple_type", "list_type"):
        return f"is {_short(value)}; it should be a list", "begin each entry with `- `, or write [a, b]"
    if kind == "value_error":
        return item["msg"].removeprefix("Value error, "), None
    message = item["msg"].replace("Input should be", "it should be", 1)
    if kind == "literal_error" and isinstance(value, bool):
        return (
            f"is {str(value).lower()}; {message}",
            f"write {'on' if value else 'off'} in place of {str(value).lower()}",
        )
    fix = _nearest_word(value, item) if kind == "literal_error" else None
    return f"is {_short(value)}; {message[0].lower()}{message[1:]}", fix


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest_word(value: Any, item: ErrorDetails) -> str | None:
    expected = str(item.get("ctx", {}).get("expected", ""))
    words = [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")]
    near = difflib.get_close_matches(str(value), words, n=1)
    return f"did you mean {near[0]!r}?" if near else None


def _nearest(key: Key, checked: Checked) -> str | None:
    section = _section_at(checked.model, key[:-1])
    name = str(key[-1])
    known = tuple(section.model_fields) if section else ()
    if difflib.get_close_matches(name, known, n=1):
        return suggest(name, known)
    elsewhere = [home for home in checked.homes if home.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return f"did you mean `{elsewhere[0]}`?"
    return suggest(name, known) if known else None


def _description(key: Key, checked: Checked) -> str:
    section = _section_at(checked.model, key[:-1])
    info = section.model_fields.get(str(key[-1])) if section else None
    if info is None:
        return dotted(key)
    if info.description:
        return (
            info.description[0].lower() + info.description[1:] if info.description[1:2].islower() else info.description
        )
    inner = _section_in(info.annotation)
    needed = [name for name, field in inner.model_fields.items() if field.is_required()] if inner else []
    return f"a section `{key[-1]}:`" + (f" with {', '.join(needed)}" if needed else "")
