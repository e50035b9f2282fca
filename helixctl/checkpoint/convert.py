"""``helixctl convert``: a published drafter of one format written in another, tensors bit for bit.

Both are then computed on a random context by the plug-in's plain implementation and must give the same logits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from helixctl.checkpoint.card import Card, make_card, public_name
from helixctl.checkpoint.export import ExportResult, check_replaceable, write_published
from helixctl.checkpoint.header import WEIGHTS_FILE, read_config
from helixctl.checkpoint.published import PublishedDrafter, default_format, load_format, open_published
from helixctl.errors import CheckpointError, UsageError
from helixctl.models.facts import TargetFacts
from helixctl.plugins import DRAFTERS, load_plugin


def convert(
    source: Path,
    output_dir: Path,
    format_name: str | None,
    *,
    target: str | None = None,
    facts: TargetFacts | None = None,
) -> ExportResult:
    """Write the drafter in ``source`` to ``output_dir`` in another format, or in the same with our tensor names.

    Args:
        source: Folder of a published drafter.
        output_dir: Made if absent; an earlier export there is replaced.
        format_name: One of the algorithm's formats; None takes its own.
        target: Hub name or folder of the target, where the source does not name it.
        facts: Of the target, where it is at hand.

    Raises:
        CheckpointError: the drafter is broken, is none that helixctl can compute, does not come back the same, or the
            format needs to know more of the target.
        UsageError: there is no such format, or source and output are one.
    """
    output_dir = output_dir.resolve()
    if output_dir == source.resolve():
        raise UsageError(f"{source} would be written over itself", fix="name another folder")
    check_replaceable(output_dir)
    found = open_published(source)
    format_name = format_name or default_format(found.algorithm)
    form = load_format(found.algorithm, format_name)
    drafter = _complete(found.describe(), target, facts)
    tensors = found.load_tensors()
    config = form.write(drafter) | {"dtype": _only_dtype(tensors)}
    readback = load_plugin(DRAFTERS, found.algorithm, "readback")

    def compare(folder: Path) -> float:
        written = (form.flatten(read_config(folder)), load_file(folder / WEIGHTS_FILE))
        difference = float(readback.published_difference((drafter, tensors), written).max_abs)
        if difference:
            raise CheckpointError(f"the converted logits differ by {difference:g}", fix="report this as a bug")
        return difference

    served = str(drafter.target or "TARGET")
    card = _card(found, format_name, served, (output_dir.name, drafter.block_size))
    write_published(output_dir, config, tensors, make_card(card), compare)
    num_bytes = (output_dir / WEIGHTS_FILE).stat().st_size
    commands = _commands(found.algorithm, format_name, served, str(output_dir), drafter.block_size)
    return ExportResult(output_dir, format_name, len(tensors), num_bytes, 0.0, commands)


def _card(found: PublishedDrafter, format_name: str, target: str, drafter: tuple[str, int]) -> Card:
    """``drafter``: name and block size."""
    return Card(
        name=drafter[0],
        algorithm=found.algorithm,
        format=format_name,
        target=target,
        facts={"converted from": f"the {found.format} format"},
        commands=_commands(found.algorithm, format_name, public_name(target), *drafter),
    )


def _commands(algorithm: str, format_name: str, target: str, drafter: str, block_size: int) -> dict[str, str]:
    part = load_plugin(DRAFTERS, algorithm, "serving")
    commands: dict[str, str] = part.serving_commands(format_name, target, drafter, block_size)
    return commands


def _complete(drafter: Any, target: str | None, facts: TargetFacts | None) -> Any:
    """What the source's format does not say, from the target."""
    if target is not None:
        drafter = replace(drafter, target=target)
    if facts is not None:
        _check_target(drafter, facts)
        drafter = replace(
            drafter,
            num_target_layers=facts.num_layers,
            target_architectures=facts.architectures,
        )
    return drafter


def _check_target(drafter: Any, facts: TargetFacts) -> None:
    wrong = [
        f"{name} is {own}, the target's is {theirs}"
        for name, own, theirs in (
            ("hidden_size", drafter.hidden_size, facts.hidden_size),
            ("vocab_size", drafter.vocab_size, facts.vocab_size),
            ("num_target_layers", drafter.num_target_layers or facts.num_layers, facts.num_layers),
        )
        if own != theirs
    ]
    wrong += [f"tap {tap} is no layer of the target" for tap in drafter.taps if tap >= facts.num_layers]
    if wrong:
        raise CheckpointError(f"the drafter is not for this target: {'; '.join(wrong)}", fix="name its own target")


def _only_dtype(tensors: dict[str, Any]) -> str:
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    if len(dtypes) != 1:
        raise CheckpointError(f"tensors have different types: {', '.join(dtypes)}", fix="store them in one type")
    return dtypes[0]
