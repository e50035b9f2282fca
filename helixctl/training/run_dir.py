"""The run directory: who may write there, what stands there, and where a run goes on.

recipe.yaml  plan.json  run.pid  status.json  metrics.jsonl  tensorboard/  checkpoints/  result.json
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from helixctl.checkpoint.store import Latest, checkpoint_path, latest_checkpoint, list_checkpoints, read_best
from helixctl.errors import CheckpointError, UsageError


@contextmanager
def claimed_run_dir(path: Path) -> Iterator[Path]:
    """Create the run directory and hold it for this process; two runs never write to one directory.

    Raises:
        UsageError: it cannot be written, or another live process holds it.
    """
    pid_file = path / "run.pid"
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_links(path)
        (path / "checkpoints").mkdir(exist_ok=True)  # what fails here would fail hours later
        _refuse_live_owner(pid_file)
        # Stays open for the whole run: whoever knows the process finds its run directory among its open files.
        held = os.fdopen(os.open(pid_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644), "w")
    except OSError as error:
        raise UsageError(
            f"run.dir cannot be written: {error.filename or path}: {error.strerror or error}",
            fix="choose another folder: --set run.dir=...",
        ) from error
    try:
        with held:
            held.write(f"{os.getpid()}\n")
            held.flush()
            yield path
    finally:
        pid_file.unlink(missing_ok=True)


def find_resume_point(path: Path, resume: bool) -> Latest | None:
    """The checkpoint that ``--resume`` goes on from; None starts at step 0.

    Raises:
        UsageError: the directory already holds a run and ``resume`` was not asked for.
        CheckpointError: there are checkpoints, and none is whole.
    """
    root = path / "checkpoints"
    present = list_checkpoints(root) if root.exists() else []
    if present and not resume:
        raise UsageError(
            f"{path} already holds a run ({len(present)} checkpoints)",
            fix="continue it with --resume, or choose another folder with --set run.dir=...",
        )
    if not present:
        return None
    found = latest_checkpoint(root)
    if found.path is None:
        raise _none_is_whole(root, found)
    return found


def choose_checkpoint(run_dir: Path, asked: Path | None) -> Path:
    """The checkpoint to validate or export: the one asked for, else the best, else the newest.

    Raises:
        CheckpointError: there is none.
    """
    if asked is not None:
        if not asked.is_dir():
            raise CheckpointError(
                f"there is no checkpoint at {asked}", fix="name a folder like checkpoints/step-00000100"
            )
        return asked
    root = run_dir / "checkpoints"
    best = read_best(root) if root.exists() else None
    if best is not None and checkpoint_path(root, best.step).is_dir():
        return checkpoint_path(root, best.step)
    newest = latest_checkpoint(root) if root.exists() else None
    if newest is None or not (newest.path or newest.skipped):
        raise CheckpointError(f"{run_dir} holds no checkpoint", fix="run `helixctl train` first, or give --checkpoint")
    if newest.path is None:
        raise _none_is_whole(root, newest)
    return newest.path


def _none_is_whole(root: Path, found: Latest) -> CheckpointError:
    reasons = "; ".join(s.reason if str(s.path) in s.reason else f"{s.path}: {s.reason}" for s in found.skipped)
    fix = f"delete {root} to begin again, or restore a copy"
    return CheckpointError(f"no checkpoint in {root} is whole: {reasons}", fix=fix)


def _refuse_links(path: Path) -> None:
    """Where others may write, a link could lead our files anywhere. Links above ``path`` are the user's own."""
    links = [inner for inner in (path, *path.iterdir()) if inner.is_symlink()]
    if links:
        raise UsageError(
            f"run.dir holds a link, and links are not followed there: {links[0]} -> {os.readlink(links[0])}",
            fix="give run.dir the folder itself, or remove the link",
        )


def _refuse_live_owner(pid_file: Path) -> None:
    try:
        owner = int(pid_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return
    if owner != os.getpid() and psutil.pid_exists(owner):
        raise UsageError(
            f"process {owner} is already running in {pid_file.parent}",
            fix=f"wait for it, stop it (kill {owner}), or choose another run.dir",
        )
