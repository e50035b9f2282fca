"""What changed since a git revision: only files that differ are looked at, and what they had before is known.

A finding is new if the old version of its file does not have it. So a line that stands where it always stood is
reported when a change elsewhere in the file made it wrong, and untouched old findings are not.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from helixctl.errors import UsageError


@dataclass(frozen=True)
class Changed:
    """A file that differs from the base. `old` is its content there; None where it is new."""

    path: Path
    old: bytes | None


def changed_files(base: str, folder: Path) -> list[Changed]:
    """Files of the repository around `folder` that differ from `base`, untracked ones included.

    Raises:
        UsageError: git is not there, `folder` is in no repository, or there is no such revision.
    """
    if base.startswith("-"):
        raise UsageError(f"--diff-base: {base!r} is no revision", fix="name a branch, tag or commit")
    root = Path(_git(folder, "rev-parse", "--show-toplevel").decode().strip())
    revision = _git(folder, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}", missing=base).decode().strip()
    changed = []
    fields = iter(_names(root, "diff", "--name-status", "-z", "-M", revision, "--"))
    for status in fields:
        old = next(fields)
        new = next(fields) if status[0] in "RC" else old
        if status[0] != "D":
            changed.append(Changed(root / new, None if status[0] == "A" else _git(root, "show", f"{revision}:{old}")))
    changed += [Changed(root / name, None) for name in _names(root, "ls-files", "--others", "--exclude-standard", "-z")]
    return changed


def _names(root: Path, *words: str) -> list[str]:
    """The parts of what git prints with -z."""
    return [name for name in _git(root, *words).decode(errors="surrogateescape").split("\0") if name]


def _git(folder: Path, *words: str, missing: str = "") -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    except FileNotFoundError as error:
        raise UsageError("--diff-base needs git, which is not installed", fix="install git") from error
    if done.returncode != 0:
        if missing:
            raise UsageError(f"--diff-base: there is no revision {missing!r}", fix="fetch it, or name another")
        text = done.stderr.decode(errors="replace").strip() or "git failed"
        raise UsageError(f"--diff-base: {text}", fix="run it inside a git repository")
    return done.stdout
