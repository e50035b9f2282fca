"""Exports of a drafter for serving: ``config.json``, ``model.safetensors`` (bfloat16) and a model card.

The folder is written beside its place, read back from the disk by the plug-in's second implementation, compared with
the drafter in memory, and only then put in place. What belongs to one algorithm (names, keys, commands of serving
engines) comes from its plug-in.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helixctl.checkpoint.atomic import new_folder
from helixctl.errors import CheckpointError
from helixctl.models.facts import TargetFacts
from helixctl.plugins import DRAFTERS, load_plugin
from helixctl.recipe.schema import DrafterOptions
from helixctl.version import __version__

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
MARKER = "exported_by"
"""Key of config.json that marks a folder as an export, which another export may replace."""

TOLERANCE = 1e-4
"""Largest difference allowed between the two implementations, relative to the largest logit. Measured: 5e-7 (width 32)
to 2e-6 (width 1024) when all is right, 5e-2 for a rotary base of 12000 in place of 10000, 5e-4 for an epsilon of 1e-3
in place of 1e-5; 1e-6 in place of 1e-5 (5e-6) is not seen."""


@dataclass(frozen=True)
class ExportSource:
    """What is exported, beside the weights."""

    options: DrafterOptions
    facts: TargetFacts
    taps: tuple[int, ...]
    target: str
    """Name or folder of the target, for commands and the card."""
    step: int | None = None
    """Optimizer steps of the checkpoint."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measured values for the card."""


@dataclass(frozen=True)
class ExportResult:
    """What was written, and how it compares with the drafter in memory."""

    dir: Path
    tensors: int
    bytes: int
    """Size of ``model.safetensors``."""
    max_logit_diff: float
    """Largest absolute difference of block logits, float32, weights rounded alike."""
    commands: Mapping[str, str]
    """Serving engine -> command line."""


def export_drafter(model: nn.Module, source: ExportSource, output_dir: Path) -> ExportResult:
    """Write ``output_dir``; an earlier export there is replaced in one step, anything else is left alone.

    Args:
        model: The drafter, on any device; not changed.
        source: Options, target and taps that it was trained with.
        output_dir: Folder of the export; made if absent.

    Raises:
        CheckpointError: ``output_dir`` holds something else, a weight is not finite, the disk refuses, or what was
            written does not compute what the drafter computes. An earlier export is then still there.
    """
    output_dir = output_dir.resolve()
    check_replaceable(output_dir)
    plugin = _part(source, "plugin")
    config = plugin.export_config(source.options, source.facts, source.taps) | {MARKER: f"helixctl {__version__}"}
    tensors: dict[str, Tensor] = plugin.export_state(model)
    _check_tensors(tensors, config)
    commands = serving_commands(source, output_dir)
    with new_folder(output_dir, "export") as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CARD_FILE).write_text(_make_card(source, output_dir.name), encoding="utf-8")
        difference = _read_back(folder, model, source, tensors)
        num_bytes = (folder / WEIGHTS_FILE).stat().st_size
    return ExportResult(output_dir, len(tensors), num_bytes, difference, commands)


def serving_commands(source: ExportSource, drafter: Path | str) -> dict[str, str]:
    """Serving engine -> the command that serves the target with the drafter in folder ``drafter``."""
    part = _part(source, "serving")
    commands: dict[str, str] = part.serving_commands(source.target, str(drafter), source.options.block_size)
    return commands


def check_replaceable(output_dir: Path) -> None:
    """Refuse a place that holds anything but an earlier export.

    Raises:
        CheckpointError: it is a file, a folder that is no export, or an export with files added to it.
    """
    if not output_dir.exists():
        return
    if not output_dir.is_dir():
        raise CheckpointError(f"{output_dir} is a file", fix="give a folder with --output")
    found = {path.name for path in output_dir.iterdir()}
    if not found:
        return
    if not _is_export(output_dir):
        raise CheckpointError(
            f"{output_dir} is not an export of helixctl; it would be lost", fix="give a new folder with --output"
        )
    added = sorted(found - {CONFIG_FILE, WEIGHTS_FILE, CARD_FILE})
    if added:
        raise CheckpointError(
            f"{output_dir} holds files that an export does not write: {', '.join(added)}",
            fix="move them away, or give a new folder with --output",
        )


def _read_back(folder: Path, model: nn.Module, source: ExportSource, tensors: Mapping[str, Tensor]) -> float:
    """Load the written files and compare: tensors bit for bit, block logits up to rounding."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    read = load_file(folder / WEIGHTS_FILE)
    wrong = sorted(name for name in tensors.keys() | read.keys() if not _same(tensors.get(name), read.get(name)))
    if wrong:
        raise CheckpointError(f"tensors changed on the way to the disk: {', '.join(wrong)}", fix="check the disk")
    rounded = copy.deepcopy(model).to("cpu", torch.float32)
    _part(source, "plugin").import_state(rounded, read)
    difference = _part(source, "readback").largest_difference(rounded, source.facts, config, read)
    if not difference.max_abs <= TOLERANCE * max(difference.scale, 1.0):
        raise CheckpointError(
            f"the export does not compute what the drafter computes: logits differ by {difference.max_abs:g} where the "
            f"largest is {difference.scale:g}",
            fix="report this as a bug of helixctl, with the recipe; nothing was replaced",
        )
    return float(difference.max_abs)


def _check_tensors(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    bad = sorted(name for name, tensor in tensors.items() if not bool(tensor.isfinite().all()))
    if bad:
        raise CheckpointError(f"weights are not finite: {', '.join(bad)}", fix="export an earlier checkpoint")
    dtype = getattr(torch, config["dtype"])
    assert all(tensor.dtype == dtype for tensor in tensors.values()), "config.json names another dtype"


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def _is_export(folder: Path) -> bool:
    try:
        return MARKER in json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _part(source: ExportSource, part: str) -> Any:
    return load_plugin(DRAFTERS, source.options.algorithm, part)


def _make_card(source: ExportSource, name: str) -> str:
    """A minimal model card; numbers only where they were measured, no paths of this machine."""
    local = Path(source.target).is_dir()
    base = Path(source.target).name if local else source.target
    head = ["---", *([] if local else [f"base_model: {base}"]), "tags:", "- speculative-decoding", "---", ""]
    facts = [
        f"- target: {base}",
        f"- algorithm: {source.options.algorithm}",
        f"- block size: {source.options.block_size} tokens, the anchor included",
        f"- tapped target layers (0-based, their output): {', '.join(map(str, source.taps))}",
        f"- mask token id: {source.options.mask_token_id}",
        *([] if source.step is None else [f"- trained for {source.step} steps"]),
        *(f"- {metric}: {value:g}" for metric, value in sorted(source.metrics.items())),
    ]
    commands = [
        line
        for engine, command in serving_commands(replace(source, target=base), name).items()
        for line in ("", f"{engine}:", "", f"    {command}")
    ]
    title = [f"# {name}", "", f"A drafter for speculative decoding of {base}, written by helixctl {__version__}.", ""]
    return "\n".join([*head, *title, *facts, "", "## Serving", *commands]) + "\n"
