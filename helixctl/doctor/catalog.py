"""The rules that there are, and which of them a run uses."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from helixctl.doctor.finding import Hit, Level
from helixctl.doctor.source import Source
from helixctl.errors import UsageError
from helixctl.plugins import load_plugin, plugin_names

RULES = "helixctl.doctor.rules"
_SECTIONS = ("What it checks", "Why it matters", "Fix")


@dataclass(frozen=True)
class Rule:
    """A rule and its documentation."""

    code: str
    name: str
    level: Level
    title: str
    documentation: str
    fix: str
    """The first sentence of the section Fix."""
    markers: tuple[bytes | tuple[bytes, ...], ...] = ()
    """A file without any of these (of a tuple: all) is clean; no markers: every file is looked at."""
    check: Callable[[Source], Iterator[Hit]] | None = None
    """None for what the runner itself reports."""

    def concerns(self, content: bytes) -> bool:
        """Whether a file with this content may have such a finding."""
        if self.check is None:
            return False
        groups = (marker if isinstance(marker, tuple) else (marker,) for marker in self.markers)
        return not self.markers or any(all(word in content for word in words) for words in groups)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    return tuple(_read(name) for name in plugin_names(RULES))


def find_rule(word: str) -> Rule:
    """The rule with this code or name.

    Raises:
        UsageError: there is none; the message suggests the nearest.
    """
    for rule in all_rules():
        if word.upper() == rule.code or word.lower() == rule.name:
            return rule
    raise UsageError(f"there is no rule {word!r}", fix=_suggestion(word))


def selected(select: Sequence[str], ignore: Sequence[str]) -> tuple[Rule, ...]:
    """Rules that `select` names and `ignore` does not. The longer prefix wins, so that HX01 may go without HX010.

    Raises:
        UsageError: a word names no rule.
    """
    wanted = {word: _matching(word) for word in [*select, *ignore]}

    def weight(rule: Rule, words: Iterable[str]) -> int:
        return max((_weight(word) for word in words if rule in wanted[word]), default=-1)

    return tuple(rule for rule in all_rules() if weight(rule, select) > weight(rule, ignore))


def matches(rule: Rule, words: Iterable[str]) -> bool:
    """Whether one of the words (codes, prefixes, names, ALL) names the rule."""
    return any(_weight(word) >= 0 and rule in _matching(word) for word in words)


def _weight(word: str) -> int:
    """How exactly a word names a rule."""
    return 0 if word.upper() == "ALL" else len(word) if word.upper().startswith("HX") else 100


def _matching(word: str) -> tuple[Rule, ...]:
    upper = word.upper()
    if upper == "ALL":
        return all_rules()
    found = tuple(r for r in all_rules() if r.name == word.lower() or (upper[:2] == "HX" and r.code.startswith(upper)))
    if not found:
        raise UsageError(f"there is no rule {word!r}", fix=_suggestion(word))
    return found


def _suggestion(word: str) -> str:
    known = [name for rule in all_rules() for name in (rule.code, rule.name)]
    near = difflib.get_close_matches(word.upper(), known, n=1) or difflib.get_close_matches(word.lower(), known, n=1)
    return f"did you mean {near[0]!r}?" if near else "see helixctl doctor --list-rules"


def _read(plugin: str) -> Rule:
    """A rule from its module."""
    module = load_plugin(RULES, plugin)
    code, _, name = plugin.partition("_")
    documentation = inspect.cleandoc(module.__doc__ or "")
    sections = sections_of(documentation)
    return Rule(
        code=code.upper(),
        name=name.replace("_", "-"),
        level=module.LEVEL,
        title=documentation.split("\n", 1)[0].partition(": ")[2].rstrip("."),
        documentation=documentation,
        fix=re.split(r"(?<=[^.])\. ", " ".join(sections.get("Fix", "").split()))[0].rstrip(".") + ".",
        markers=tuple(getattr(module, "MARKERS", ())),
        check=getattr(module, "check", None),
    )


def sections_of(documentation: str) -> dict[str, str]:
    """The texts under the headings of a rule's documentation."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in documentation.split("\n")[1:]:
        if line.strip() in _SECTIONS and not line.startswith(" "):
            current = sections.setdefault(line.strip(), [])
        else:
            current.append(line)
    return {name: inspect.cleandoc("\n".join(lines)) for name, lines in sections.items()}
