"""Checkpoints of a run: ``step-00000100/`` with safetensors files, ``state.json`` and ``manifest.json``.

A checkpoint is good when its manifest is ours and every file has the size and SHA-256 that the manifest says;
anything else is reported and never used. No pickle. What the tensors mean is the caller's business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from helixctl.checkpoint.atomic import explained, new_folder, remove_folder, remove_leftovers, write_json
from helixctl.errors import CheckpointError

__all__ = [
    "Best",
    "Checkpoint",
    "Latest",
    "Skipped",
    "checkpoint_path",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "prune",
    "read_best",
    "remove_leftovers",
    "save_checkpoint",
    "verify_checkpoint",
    "write_best",
]

FORMAT = "helixctl-checkpoint"
VERSION = 1
_PREFIX = "step-"
_MANIFEST = "manifest.json"
_STATE = "state.json"
_BEST = "best.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory; all tensors on the CPU."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    """File stem -> tensor name -> tensor."""
    state: dict[str, Any]


@dataclass(frozen=True)
class Skipped:
    """A folder that looks like a checkpoint and cannot be used."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Latest:
    """The newest good checkpoint, if any, and the newer folders passed over."""

    path: Path | None
    step: int | None
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Best:
    """What ``best.json`` points at."""

    step: int
    metric: str
    value: float


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` stands."""
    return root / f"{_PREFIX}{step:08d}"


def save_checkpoint(
    root: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """Write ``<root>/step-<step>/`` so that it exists whole or not at all; earlier checkpoints are untouched.

    Args:
        root: folder of all checkpoints of the run; made if absent.
        step: optimizer steps taken.
        tensors: file stem -> tensor name -> tensor (any device, dtype and shape, 0-d too). Stored bit for bit.
        state: anything that JSON holds; tuples come back as lists.

    Returns:
        The new folder.

    Raises:
        CheckpointError: disk full, read-only or no permission. Nothing of the new checkpoint is left.
    """
    final = checkpoint_path(root, step)
    with new_folder(final, "checkpoint") as folder:
        for stem, named in tensors.items():
            save_file(_storable(named), folder / f"{stem}.safetensors")
        (folder / _STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": _describe(folder)}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return final


def load_checkpoint(path: Path, verify: bool = True) -> Checkpoint:
    """Read a checkpoint back; ``verify`` compares every file's SHA-256 with the manifest first.

    Raises:
        CheckpointError: not a checkpoint, torn or changed; names the file and what to do.
    """
    verify_checkpoint(path, deep=verify)
    manifest = _read_manifest(path)
    with explained(f"cannot read checkpoint {path}"):
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        stems = [Path(name).stem for name in manifest["files"] if name.endswith(".safetensors")]
        tensors = {stem: load_file(path / f"{stem}.safetensors") for stem in stems}
    return Checkpoint(path, manifest["step"], tensors, state)


def list_checkpoints(root: Path) -> list[Path]:
    """Folders of ``root`` that are named like checkpoints, good or not, oldest first."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if _step_of(p) is not None), key=lambda p: _step_of(p) or 0)


def latest_checkpoint(root: Path) -> Latest:
    """Find the newest checkpoint whose checksums hold; newer ones that fail are listed with the reason."""
    skipped: list[Skipped] = []
    for path in reversed(list_checkpoints(root)):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            skipped.append(Skipped(path, error.message))
        else:
            return Latest(path, _step_of(path), tuple(skipped))
    return Latest(None, None, tuple(skipped))


def verify_checkpoint(path: Path, deep: bool = True) -> None:
    """Check manifest and sizes; with ``deep`` also every SHA-256.

    Raises:
        CheckpointError: what is wrong with which file.
    """
    manifest = _read_manifest(path)
    fix = "use an earlier checkpoint of the run; --resume does so by itself"
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} lacks its file {name}", fix=fix)
        size = file.stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(f"{file} has {size} bytes, the manifest says {facts['bytes']}", fix=fix)
        if deep:
            with explained(f"cannot read {file}"):
                digest = _sha256(file)
            if digest != facts["sha256"]:
                raise CheckpointError(f"{file} was changed or damaged: its SHA-256 differs from the manifest", fix=fix)


def prune(root: Path, keep_last: int, best_step: int | None) -> tuple[int, ...]:
    """Delete old checkpoints, never the newest good one and never the best.

    Keeps the ``keep_last`` newest that look whole (at least one), the best, and everything that is not ours. Where
    the newest is damaged, the newest that passes its checksums stays however old it is.

    Returns:
        The steps deleted, oldest first.
    """
    newest_good = latest_checkpoint(root).step
    if newest_good is None:
        return ()
    ours = {step: path for path in list_checkpoints(root) if (step := _step_of(path)) is not None and _is_ours(path)}
    whole = [step for step, path in ours.items() if _is_whole(path)]
    kept = {*whole[-max(keep_last, 1) :], newest_good, best_step}
    doomed = tuple(step for step in ours if step not in kept and step < newest_good)
    for step in doomed:
        with explained(f"cannot delete the old checkpoint {ours[step]}"):
            remove_folder(ours[step])
    return doomed


def write_best(root: Path, best: Best) -> None:
    """Let ``best.json`` point at the best checkpoint so far, in one step."""
    write_json(root / _BEST, {"step": best.step, "metric": best.metric, "value": best.value})


def read_best(root: Path) -> Best | None:
    """The pointer to the best checkpoint; None where none was written.

    Raises:
        CheckpointError: the file is there and cannot be read.
    """
    path = root / _BEST
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Best(int(found["step"]), str(found["metric"]), float(found["value"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", fix="delete it; the next validation writes it") from error


def _storable(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory with one another, as safetensors wants them."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named.items():
        copy = tensor.detach().to("cpu").contiguous()
        memory = copy.untyped_storage().data_ptr()
        if memory in seen or copy.untyped_storage().nbytes() != copy.numel() * copy.element_size():
            copy = copy.clone()
        seen.add(memory)
        result[name] = copy
    return result


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    return {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir())}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _step_of(path: Path) -> int | None:
    digits = path.name.removeprefix(_PREFIX)
    named = path.name.startswith(_PREFIX) and digits.isascii() and digits.isdigit()
    return int(digits) if named and path == checkpoint_path(path.parent, int(digits)) and path.is_dir() else None


def _read_manifest(path: Path) -> dict[str, Any]:
    fix = "give the folder of a checkpoint: <run.dir>/checkpoints/step-<number>"
    file = path / _MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {_MANIFEST}", fix=fix) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}", fix="use an earlier checkpoint") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file} was not written by helixctl", fix=fix)
    if manifest.get("version") != VERSION:
        version = manifest.get("version")
        raise CheckpointError(f"{file} has format version {version}; this helixctl reads {VERSION}", fix="update")
    if not _well_formed(manifest) or _step_of(path) not in (None, manifest["step"]):
        raise CheckpointError(f"{file} does not describe this folder", fix="use an earlier checkpoint")
    return manifest


def _well_formed(manifest: dict[str, Any]) -> bool:
    files = manifest.get("files")
    if not isinstance(manifest.get("step"), int) or not isinstance(files, dict) or _STATE not in files:
        return False
    plain = all(Path(name).name == name for name in files)
    return plain and all(isinstance(f, dict) and {"bytes", "sha256"} <= f.keys() for f in files.values())


def _is_ours(path: Path) -> bool:
    try:
        _read_manifest(path)
    except CheckpointError:
        return False
    return True


def _is_whole(path: Path) -> bool:
    try:
        verify_checkpoint(path, deep=False)
    except CheckpointError:
        return False
    return True
