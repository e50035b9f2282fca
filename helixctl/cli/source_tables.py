"""What the renderer shows of the sources of documents, as labels and texts. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helixctl.data.store import Manifest, MixLine


def source_rows(manifest: Manifest) -> dict[str, str]:
    """The account of every source: read, kept, dropped by reason, and what it gives to an epoch.

    Nothing for a single one: then it is the account of all.
    """
    if len(manifest.sources) < 2:
        return {}
    return {f"source {name}": "\n".join(_lines(counts)) for name, counts in manifest.by_source.items()}


def mix_rows(mix: Sequence[MixLine]) -> dict[str, str]:
    """What an epoch is made of; nothing for a single source."""
    if len(mix) < 2:
        return {}
    return {"mix": "\n".join(f"{line.share:.1%} {line.name}: {line.documents:,} documents" for line in mix)}


def _lines(counts: dict[str, Any]) -> list[str]:
    """What became of the documents that were read, and what they give to an epoch."""
    fate = f"{counts['read']:,} read, {counts['kept']:,} kept"
    if counts["held_out"]:
        fate += f" ({counts['held_out']:,} held out)"
    for reason, count in sorted(counts["dropped"].items(), key=lambda item: -item[1]):
        fate += f", {count:,} {reason}"
    if not counts["documents"]:
        return [fate]
    weight = "" if counts["weight"] == 1.0 else f" (weight {counts['weight']:g})"
    gives = (
        f"{counts['documents']:,} documents an epoch{weight}, {counts['tokens']:,} tokens, {counts['share']:.1%} of all"
    )
    return [fate, f"{gives}, {counts['supervised'] / counts['tokens']:.1%} of them supervised"]
