"""Exports of a drafter for serving: ``config.json``, ``model.safetensors`` (bfloat16) and a model card.

The folder is written beside its place, read back from the disk by the plug-in's second implementation, compared with
the drafter in memory, and only then put in place. What belongs to one algorithm (formats, names, keys, commands of
serving engines) comes from its plug-in.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helixctl.checkpoint.atomic import new_folder
from helixctl.checkpoint.card import Card, make_card, public_name
from helixctl.checkpoint.header import CONFIG_FILE, WEIGHTS_FILE, read_config
from helixctl.checkpoint.published import load_format
from helixctl.errors import CheckpointError
from helixctl.models.facts import TargetFacts
from helixctl.plugins import DRAFTERS, load_plugin
from helixctl.recipe.schema import DrafterOptions
from helixctl.version import __version__

CARD_FILE = "README.md"
MARKER = "exported_by"
"""Key of config.json that marks a folder as an export, which another export may replace."""
DEFAULT_FORMAT = "zlab"

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
    format: str = DEFAULT_FORMAT
    """One of the algorithm's formats."""
    license: str | None = None
    """Of the drafter, for the card."""
    recipe: str | None = None
    """What it was trained with, YAML, for the card."""


@dataclass(frozen=True)
class ExportResult:
    """What was written, and how it compares with what it was made from."""

    dir: Path
    format: str
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
    form = load_format(source.options.algorithm, source.format)
    describe = _part(source, "published").describe
    config = form.write(describe(source.options, source.facts, source.taps, source.target))
    tensors: dict[str, Tensor] = _part(source, "plugin").export_state(model)
    card = make_card(_card_of(source, output_dir.name))

    def compare(folder: Path) -> float:
        return _read_back(folder, model, source, form.flatten)

    difference = write_published(output_dir, config, tensors, card, compare)
    num_bytes = (output_dir / WEIGHTS_FILE).stat().st_size
    commands = serving_commands(source, output_dir)
    return ExportResult(output_dir, source.format, len(tensors), num_bytes, difference, commands)


def write_published(
    output_dir: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    card: str,
    compare: Callable[[Path], float],
) -> float:
    """Write a published folder, read it back, and put it in place if ``compare`` of what was written does not raise.

    Returns:
        What ``compare`` returned.

    Raises:
        CheckpointError: a weight is not finite, the disk refuses, or tensors came back changed.
    """
    _check_tensors(tensors, config)
    marked = {**config, MARKER: f"helixctl {__version__}"}
    with new_folder(output_dir, "export") as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(marked, indent=2) + "\n", encoding="utf-8")
        save_file(dict(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
        read = load_file(folder / WEIGHTS_FILE)
        wrong = sorted(name for name in tensors.keys() | read.keys() if not _same(tensors.get(name), read.get(name)))
        if wrong:
            raise CheckpointError(f"tensors changed on the way to the disk: {', '.join(wrong)}", fix="check the disk")
        return compare(folder)


def serving_commands(source: ExportSource, drafter: Path | str) -> dict[str, str]:
    """Serving engine -> the command that serves the target with the drafter in folder ``drafter``."""
    part = _part(source, "serving")
    commands: dict[str, str] = part.serving_commands(
        source.format, source.target, str(drafter), source.options.block_size
    )
    return commands


def check_replaceable(output_dir: Path, files: Collection[str] = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)) -> None:
    """Refuse a place that holds anything but an earlier export, which consists of ``files``.

    Raises:
        CheckpointError: it is a file, a folder that is no export, or an export with files added to it.
    """
    if not output_dir.exists():
        return
    if not output_dir.is_dir():
        raise CheckpointError(f"{output_dir} is a file", fix="name a folder")
    found = {path.name for path in output_dir.iterdir()}
    if not found:
        return
    if not _is_export(output_dir):
        raise CheckpointError(f"{output_dir} is not an export of helixctl; it would be lost", fix="name a new folder")
    added = sorted(found - {*files})
    if added:
        raise CheckpointError(
            f"{output_dir} holds files that an export does not write: {', '.join(added)}",
            fix="move them away, or name a new folder",
        )


def _read_back(
    folder: Path, model: nn.Module, source: ExportSource, flatten: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> float:
    """Load the written files and compare block logits, up to rounding."""
    read = load_file(folder / WEIGHTS_FILE)
    rounded = copy.deepcopy(model).to("cpu", torch.float32)
    _part(source, "plugin").import_state(rounded, read)
    config = flatten(read_config(folder))
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


def _card_of(source: ExportSource, name: str) -> Card:
    base = public_name(source.target)
    facts = {
        "block size": f"{source.options.block_size} tokens, the anchor included",
        "tapped target layers": f"{', '.join(map(str, source.taps))} (0-based, their output)",
        "mask token id": str(source.options.mask_token_id),
    }
    if source.step:
        facts["trained for"] = f"{source.step} steps"
    return Card(
        name=name,
        algorithm=source.options.algorithm,
        format=source.format,
        target=source.target,
        license=source.license,
        facts=facts,
        metrics=source.metrics,
        recipe=source.recipe,
        commands=serving_commands(replace(source, target=base), name),
    )
