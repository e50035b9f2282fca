"""The model card of a published drafter: numbers only where they were measured, no path of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from helixctl.version import __version__


@dataclass(frozen=True)
class Card:
    """What the card says."""

    name: str
    """Of the folder."""
    algorithm: str
    format: str
    target: str
    """Hub name of the target, or its folder: then only the last part is told."""
    license: str | None = None
    """Identifier as the hub knows it, e.g. apache-2.0; the field is left out where nobody said."""
    facts: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    recipe: str | None = None
    """YAML."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Engine -> command; with names that hold anywhere."""


def is_local(target: str) -> bool:
    """Whether a target is named by a place on this machine rather than by its name on a hub."""
    return target.startswith(("/", ".", "~")) or Path(target).is_dir()


def public_name(target: str) -> str:
    """The target's name without the place where it lies."""
    return Path(target).name if is_local(target) else target


def make_card(card: Card) -> str:
    """Markdown with the front matter that hubs read."""
    base = public_name(card.target)
    head = [
        "---",
        *([] if is_local(card.target) else [f"base_model: {card.target}"]),
        *([f"license: {card.license}"] if card.license else []),
        "library_name: transformers",
        "tags:",
        "- speculative-decoding",
        f"- {card.algorithm}",
        "---",
        "",
        f"# {card.name}",
        "",
        f"A drafter for speculative decoding of {base}, written by helixctl {__version__} in the {card.format} format.",
        "It means nothing without that target, whose own licence and terms apply to their joint use.",
        "",
    ]
    rows = {"target": base, "algorithm": card.algorithm, **card.facts}
    lines = [f"- {name}: {text}" for name, text in rows.items()]
    measured = [f"| {name} | {value:.4g} |" for name, value in sorted(card.metrics.items())]
    if measured:
        lines += ["", "## Measured", "", "| metric | value |", "|---|---|", *measured]
        lines += ["", "Acceptance length counts the target's own next token."]
    if card.commands:
        lines += ["", "## Serving"]
        for engine, command in card.commands.items():
            lines += ["", f"{engine}:", "", f"    {command}"]
    if card.recipe:
        lines += ["", "## Recipe", "", "```yaml", card.recipe.rstrip(), "```"]
    return "\n".join([*head, *lines]) + "\n"
