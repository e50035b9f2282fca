"""Writes the pages of the documentation that repeat what the code says: docs/recipe.md and docs/rules.md.

python -m scripts.reference
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helixctl.cli.pages import slug
from helixctl.doctor.catalog import Rule, all_rules, sections_of
from helixctl.recipe.load import recipe_schema

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECIPE = """\
<!-- Written by `python -m scripts.reference` from the schema. Do not edit. -->
# The recipe

Every option, its default and its meaning. `helixctl recipe schema` prints the same as JSON Schema, for editors that
complete and check while you type; `helixctl init` writes a first recipe. Options are given in YAML, or as
`--set section.option=value`. Unknown options are errors. Relative paths start at the recipe's folder.
"""
RULES = """\
<!-- Written by `python -m scripts.reference` from the rules' docstrings. Do not edit. -->
# Rules of the doctor

`helixctl doctor --explain CODE` prints one of these, `helixctl doctor --list-rules` all in short. How to run the
doctor, and how to suppress a finding: [doctor.md](doctor.md).

| rule | level | what it finds |
|---|---|---|
"""
RANGES = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def main() -> None:
    """Write both."""
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Text by file name."""
    return {"recipe.md": recipe_page(), "rules.md": rules_page()}


def recipe_page() -> str:
    """Sections of both kinds of recipe; what the second kind shares with the first stands once."""
    schema = recipe_schema()
    parts = [RECIPE]
    told: dict[str, str] = {}
    for kind in (option["$ref"].rsplit("/", 1)[1] for option in schema["oneOf"]):
        whole = schema["$defs"][kind]
        parts.append(f"## kind: {kind}\n\n{_plain(whole['description'])}\n")
        for name, option in whole["properties"].items():
            for heading, text in _sections(schema["$defs"], f"{kind}: {name}", option):
                if text in told:
                    text = f"The options of [{told[text]}](#{slug(told[text])}).\n"
                else:
                    told[text] = heading
                parts.append(f"### {heading}\n\n{text}")
    return "\n".join(parts)


def _sections(definitions: dict[str, Any], heading: str, option: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The section an option holds and those within it; nothing for an option that is a plain value."""
    if "oneOf" in option:
        for choice in option["oneOf"]:
            name = choice["$ref"].rsplit("/", 1)[1]
            yield from _sections(definitions, f"{heading}, {name}", choice)
        return
    reference = _reference(option)
    if reference is None:
        return
    section = definitions[reference]
    rows = ["| option | value | default | meaning |", "|---|---|---|---|"]
    inner: list[tuple[str, dict[str, Any]]] = []
    for name, own in section["properties"].items():
        rows.append(f"| `{name}` | {_value(definitions, own)} | {_default(section, name, own)} | {_meaning(own)} |")
        inner.append((f"{heading}.{name}", own))
    yield heading, f"{_plain(section.get('description', ''))}\n\n" + "\n".join(rows) + "\n"
    for name, own in inner:
        yield from _sections(definitions, name, own)


def _reference(option: dict[str, Any]) -> str | None:
    """The definition that an option, or a list of them, or one of its choices, refers to."""
    if "$ref" in option:
        return str(option["$ref"]).removeprefix("#/$defs/")
    parts = [*option.get("anyOf", ()), *option.get("allOf", ()), option.get("items", {})]
    return next((found for part in parts if part and (found := _reference(part))), None)


def _value(definitions: dict[str, Any], option: dict[str, Any]) -> str:
    """What may stand there, for people."""
    if "anyOf" in option:
        return " or ".join(dict.fromkeys(_value(definitions, part) for part in option["anyOf"]))
    if _reference(option) is not None:
        return "list of sections" if option.get("type") == "array" else "section"
    if "const" in option:
        return f"`{option['const']}`"
    if "enum" in option:
        return ", ".join(f"`{word}`" for word in option["enum"])
    kind = option.get("type", "any")
    if kind == "array":
        items = [_value(definitions, part) for part in option.get("prefixItems", [])] or [
            _value(definitions, option.get("items", {}))
        ]
        return f"list of {items[0]}"
    bounds = [f"{sign} {option[name]:g}" for name, sign in RANGES.items() if name in option]
    words = {"string": "path" if option.get("format") == "path" else "text", "null": "null", "boolean": "true, false"}
    return " ".join([words.get(kind, kind), ", ".join(bounds)]).strip()


def _default(section: dict[str, Any], name: str, option: dict[str, Any]) -> str:
    if name in section.get("required", ()):
        return "required"
    value = option.get("default")
    return "" if value is None or isinstance(value, dict) else f"`{json.dumps(value)}`".replace('"', "")


def _meaning(option: dict[str, Any]) -> str:
    return _plain(option.get("description", "")).replace("|", "\\|")


def _plain(text: str) -> str:
    """One line."""
    return " ".join(text.split())


def rules_page() -> str:
    """A table of all rules, then each with what, why and fix."""
    rules = all_rules()
    rows = [f"| [{r.code}](#{slug(_rule_heading(r))}) | {r.level} | {r.title} |" for r in rules]
    parts = [RULES + "\n".join(rows) + "\n"]
    for rule in rules:
        parts.append(f"## {_rule_heading(rule)}\n\n*{rule.level}* · {rule.title}.\n")
        for name, text in sections_of(rule.documentation).items():
            parts.append(f"**{name}.**\n\n{text}\n")
    return "\n".join(parts)


def _rule_heading(rule: Rule) -> str:
    return f"{rule.code} {rule.name}"


if __name__ == "__main__":
    main()
