"""Folders and small files that appear whole or not at all, also after a crash or a power cut.

Everything is written under a temporary name beside its place, flushed to the disk, and renamed. Knows nothing of
what is written. ``remove_leftovers`` clears what a killed process left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from helixctl.errors import FULL_DISK, FULL_DISK_PAGE, CheckpointError, UsageError

TEMPORARY_PREFIX = ".tmp-"
"""Names of unfinished or half-deleted folders and files begin with this."""

_REPLACED_PREFIX = ".replaced-"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_FIXES = {
    errno.ENOSPC: "free space on that disk, then run the command again (training: with --resume)",
    errno.EDQUOT: "the quota is used up: free space, then run the command again (training: with --resume)",
    errno.EFBIG: "raise the file size limit (`ulimit -f`), then run the command again (training: with --resume)",
    errno.EROFS: "the file system is read-only: choose a writable folder",
    errno.EACCES: "make the folder writable for this user, or choose another",
    errno.EPERM: "make the folder writable for this user, or choose another",
    errno.ENOTDIR: "a file is in the way: remove it, or choose another folder",
    errno.EEXIST: "a file is in the way: remove it, or choose another folder",
}


@contextmanager
def new_folder(final: Path, what: str) -> Iterator[Path]:
    """Give a temporary folder that becomes ``final`` when the block ends without an exception.

    A folder already at ``final`` is replaced in one step. On any exception the temporary folder is removed and
    ``final`` is as before. ``what`` names the thing in messages.

    Raises:
        CheckpointError: the disk is full or the place is not writable; says where and what to do.
    """
    temporary = temporary_name(final)
    try:
        with explained(f"cannot write {what} {final}"):
            final.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            yield temporary
            sync_tree(temporary)
            _put_in_place(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn errors of the operating system, also those seen by safetensors, into a CheckpointError with the fix."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _errno_in(str(error))
        text = os.strerror(number) if number else str(error)
        fix = _FIXES.get(number or 0, "check the disk and the folder's permissions")
        see = FULL_DISK_PAGE if number in FULL_DISK else None
        raise CheckpointError(f"{doing}: {text}", fix=fix, see=see) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as `write_text` does."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file in one step: readers see the old or the new content, never a part.

    Raises:
        CheckpointError: the disk is full or the place is not writable.
    """
    temporary = temporary_name(path)
    try:
        with explained(f"cannot write {path}"):
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    finally:
        with contextlib.suppress(OSError):  # whatever stood in the way of writing it must not hide behind this
            temporary.unlink(missing_ok=True)


def write_output(path: Path, text: str, option: str, *, parents: bool = False) -> None:
    """Write a file that the user named by ``option``, whole or not at all; a device or a pipe is written to.

    With ``parents`` folders above it that are missing are made.

    Raises:
        UsageError: it cannot be written there.
    """
    temporary = temporary_name(path)
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
    except OSError as error:
        see = FULL_DISK_PAGE if error.errno in FULL_DISK else None
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", fix=f"choose another file with {option}", see=see
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Delete a folder so that a crash half-way leaves a temporary name, not a torn folder."""
    doomed = temporary_name(path)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(parent: Path) -> tuple[str, ...]:
    """Remove what a killed process left in ``parent``; put back a folder whose replacement never came.

    Call it only when no other process writes there: at the start of a run, on one rank.

    Returns:
        The names removed or put back, sorted.
    """
    if not parent.is_dir():
        return ()
    found = sorted(p for p in parent.iterdir() if p.name.startswith((TEMPORARY_PREFIX, _REPLACED_PREFIX)))
    with explained(f"cannot clear unfinished files in {parent}"):
        for path in found:
            original = parent / path.name.removeprefix(_REPLACED_PREFIX)
            if path.name.startswith(_REPLACED_PREFIX) and not original.exists():
                path.rename(original)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return tuple(path.name for path in found)


def temporary_name(path: Path) -> Path:
    """A free temporary name beside ``path``."""
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below ``folder``, and itself, to the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Flush one file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename; an existing folder trades places with the new one, so that a good one stands there at any instant."""
    if not final.exists():
        temporary.rename(final)
    elif not _exchange(temporary, final):
        aside = final.with_name(_REPLACED_PREFIX + final.name)
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)  # a crash before the next line: remove_leftovers puts it back
        temporary.rename(final)
        shutil.rmtree(aside)
    sync(final.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    result = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return bool(result == 0)


def _errno_in(text: str) -> int | None:
    """The number in Rust's ``... (os error 28)``."""
    _, found, rest = text.partition("(os error ")
    return int(rest.partition(")")[0]) if found else None
