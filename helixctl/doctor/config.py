"""`[tool.helixctl.doctor]` in pyproject.toml: what a project wants of its check-up. All mistakes are named at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from helixctl.doctor.finding import LEVELS, Level
from helixctl.doctor.source import RuleOptions
from helixctl.errors import UsageError
from helixctl.plugins import suggest

FailOn = Literal["error", "warning", "info", "never"]
DEFAULT_EXCLUDE = (
    ".git", ".hg", ".venv", "venv", ".env", ".tox", ".nox", "node_modules", "__pycache__", ".mypy_cache",
    ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", "site-packages", "build", "dist", ".eggs",
)  # fmt: skip
_LISTS = ("select", "extend-select", "ignore", "exclude", "extend-exclude")
_TEXTS = ("project-tokenizer", "target-python", "target-torch", "baseline", "fail-on", "show")
_KEYS = (*_LISTS, *_TEXTS, "per-file-ignores")


@dataclass(frozen=True)
class Config:
    """The settings of one run; `root` is the folder that patterns and reported paths start from."""

    root: Path
    select: tuple[str, ...] = ("ALL",)
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    baseline: Path | None = None
    fail_on: FailOn = "error"
    show: Level = "warning"
    options: RuleOptions = field(default_factory=RuleOptions)

    def is_excluded(self, relative: str) -> bool:
        """Whether a path is left out. A pattern without a slash names a file or folder anywhere."""
        parts = relative.split("/")
        return any(
            any(fnmatchcase(part, pattern) for part in parts) if "/" not in pattern else matches_path(relative, pattern)
            for pattern in self.exclude
        )

    def ignored_for(self, relative: str) -> list[str]:
        """Rules that are off for a file."""
        patterns = self.per_file_ignores.items()
        return [word for pattern, words in patterns if matches_path(relative, pattern) for word in words]


def matches_path(relative: str, pattern: str) -> bool:
    """`tests/**`, `src/*.py`, `conftest.py` (in any folder), `scripts` (a whole folder)."""
    pattern = pattern.removeprefix("./").rstrip("/")
    candidates = [pattern, f"{pattern}/*"]
    if "/" not in pattern:
        candidates += [f"*/{pattern}", f"*/{pattern}/*"]
    if "**/" in pattern:
        candidates.append(pattern.replace("**/", ""))
    return any(fnmatchcase(relative, candidate) for candidate in candidates)


def find_config(start: Path) -> Path | None:
    """The nearest pyproject.toml with our section, from `start` upwards, no further than the repository's root."""
    folder = start if start.is_dir() else start.parent
    for candidate in (folder, *folder.parents):
        path = candidate / "pyproject.toml"
        if path.is_file() and "helixctl" in path.read_text(encoding="utf-8", errors="replace"):
            return path
        if (candidate / ".git").exists():
            return None
    return None


def load_config(path: Path | None, default_root: Path) -> Config:
    """Settings from a TOML file; the defaults where it has no section of ours.

    Raises:
        UsageError: the file cannot be read, or the section has mistakes; all of them are named.
    """
    if path is None:
        return Config(root=default_root)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="mend the file") from error
    section = content.get("tool", {}).get("helixctl", {}).get("doctor", {})
    problems = list(_problems(section))
    if problems:
        raise UsageError(f"{path}: [tool.helixctl.doctor]: " + "\n  ".join(problems), fix="mend the section")
    return _config(section, path.parent)


def _config(section: Mapping[str, Any], root: Path) -> Config:
    default = Config(root)
    return Config(
        root=root,
        select=tuple(section.get("select", default.select)),
        extend_select=tuple(section.get("extend-select", ())),
        ignore=tuple(section.get("ignore", ())),
        exclude=(*section.get("exclude", default.exclude), *section.get("extend-exclude", ())),
        per_file_ignores={key: tuple(words) for key, words in section.get("per-file-ignores", {}).items()},
        baseline=root / section["baseline"] if "baseline" in section else None,
        fail_on=section.get("fail-on", default.fail_on),
        show=section.get("show", default.show),
        options=RuleOptions(
            project_tokenizer=section.get("project-tokenizer"),
            target_python=_version(section.get("target-python")),
            target_torch=_version(section.get("target-torch")),
        ),
    )


def _problems(section: Mapping[str, Any]) -> list[str]:
    problems = [f"{key}: unknown key; {suggest(key, _KEYS)}" for key in section if key not in _KEYS]
    for key in _LISTS:
        if key in section and not _is_words(section[key]):
            problems.append(f"{key}: must be a list of strings")
    for key in _TEXTS:
        if key in section and not isinstance(section[key], str):
            problems.append(f"{key}: must be a string")
    ignores = section.get("per-file-ignores", {})
    if not isinstance(ignores, dict) or not all(_is_words(words) for words in ignores.values()):
        problems.append("per-file-ignores: must map patterns to lists of rules")
    if section.get("fail-on", "error") not in (*LEVELS, "never"):
        problems.append("fail-on: must be error, warning, info or never")
    if section.get("show", "error") not in LEVELS:
        problems.append("show: must be error, warning or info")
    for key in ("target-python", "target-torch"):
        if isinstance(section.get(key), str) and _version(section[key]) is None:
            problems.append(f"{key}: must be a version such as 3.11")
    return problems


def _is_words(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(word, str) for word in value)


def _version(text: object) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text) if isinstance(text, str) else None
    return (int(found[1]), int(found[2])) if found else None
