"""Errors meant for users: each says what is wrong, where, and the fix.

Anything else that escapes is a bug in helixctl. Cancellation of stages is not an error and lives in
``engine``; nothing here imports anything of ours.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the operating system's errors that are told by ``FULL_DISK_PAGE``."""
FULL_DISK_PAGE = "errors.md#a-full-disk"


class HelixError(Exception):
    """Something the user can act on. ``exit_code`` is what the command returns."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str | None = None, see: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.see = see
        """``page.md#anchor`` where more is told than at the class's own place in errors.md."""

    @property
    def page(self) -> str:
        """Page and section that tell more, as `helixctl docs` takes them; every class has its own on page errors."""
        return (self.see or f"errors.md#{type(self).__name__.lower()}").replace(".md#", " ")

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class UsageError(HelixError):
    """The command line, a path or a name given by the user is wrong."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One mistake in a recipe. ``where`` is ``file:line`` or an option; ``key`` is the dotted path."""

    key: str
    message: str
    where: str = ""
    fix: str | None = None
    see: str | None = None
    """``page.md#anchor`` that tells more than the section of recipe errors."""


class RecipeError(UsageError):
    """Every mistake found in a recipe, reported at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        see = next((p.see for p in self.problems if p.see), None)
        super().__init__("\n".join(_one_line(p) for p in self.problems), see=see)


class DataError(HelixError):
    """Training data cannot be read, or leaves nothing to train on."""


class ModelError(HelixError):
    """A target or drafter cannot be loaded or does not fit the recipe."""


class CheckpointError(HelixError):
    """A checkpoint or export is missing, torn, or belongs to another run."""


class StageFailed(HelixError):
    """A pipeline stage raised; ``__cause__`` is the original exception with its traceback."""

    def __init__(self, stage: str, cause: BaseException) -> None:
        fix = getattr(cause, "fix", None)
        text = getattr(cause, "message", None) or f"{type(cause).__name__}: {cause}"
        super().__init__(f"stage {stage!r} failed: {text}", fix=fix)
        self.stage = stage
        self._cause = cause

    @property
    def page(self) -> str:
        """That of the cause, where it has one."""
        return self._cause.page if isinstance(self._cause, HelixError) else super().page


class Interrupted(HelixError):
    """The user asked to stop. Exit code 128 + signal number."""

    def __init__(self, signal_number: int, message: str, *, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.exit_code = 128 + signal_number


def _one_line(problem: Problem) -> str:
    where = f"{problem.where}: " if problem.where else ""
    fix = f"\n  fix: {problem.fix}" if problem.fix else ""
    return f"{where}{problem.key}: {problem.message}{fix}"
