"""What the judges of `scripts/judge` share: verdicts, comparisons, the report. Runs where helixctl is not installed.

Legend: S tokens of a row, B block size, K taps, H width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

TOLERANCE = 1e-4
"""Of relative differences: two float32 implementations of the same thing are at 1e-6."""


@dataclass(frozen=True)
class Verdict:
    """One comparison."""

    what: str
    equal: bool
    detail: str


def read_arguments(doc: str | None) -> tuple[Path, Path | None, dict[str, Any]]:
    """Work folder, where the JSON report goes, and what helixctl wrote down."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("work", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    reference = json.loads((arguments.work / "reference.json").read_text(encoding="utf-8"))
    return arguments.work, arguments.json, reference


def judge_loading(loading: dict[str, Any], borrowed: frozenset[str] = frozenset()) -> Verdict:
    """Every tensor has its place, and no place is left without one, but for those ``borrowed`` from the target."""
    troubles = {kind: sorted(set(map(str, names)) - borrowed) for kind, names in loading.items()}
    troubles = {kind: names for kind, names in troubles.items() if names}
    return Verdict("tensor names and shapes", not troubles, str(troubles) if troubles else "all found")


def judge_answer(
    number: int, ours: dict[str, Any], theirs: tuple[list[int], list[int]], sizes: tuple[int, int]
) -> list[Verdict]:
    """Tokens and accepted tokens per cycle of one answer; ``sizes`` are the longest answer and the block."""
    tokens, accepted = theirs
    cycles, own = (full_cycles(counts, *sizes) for counts in (accepted, ours["accepted"]))
    mean = sum(cycles) / len(cycles) if cycles else float("nan")
    return [
        judge_list(f"answer {number}, tokens", ours["tokens"], tokens, f"{len(tokens)} tokens"),
        judge_list(f"answer {number}, plain tokens", ours["plain"], tokens, "helixctl without a drafter"),
        judge_list(f"answer {number}, accepted", own, cycles, f"{len(cycles)} full cycles, mean {mean:.3f}"),
    ]


def full_cycles(accepted: list[int], max_new_tokens: int, block_size: int) -> list[int]:
    """The cycles that drafted a whole block.

    Near the length limit z-lab drafts a shorter block, helixctl (as serving engines do) a whole one whose end is not
    verified. All slots of a block see each other, so the drafts may then differ, and the answers do not.
    """
    emitted, full = 1, []  # the prefill emits the first token
    for count in accepted:
        if max_new_tokens - emitted + 1 < block_size:
            break
        full.append(count)
        emitted += count
    return full


def judge_numbers(what: str, difference: float) -> Verdict:
    """Equal up to rounding; NaN is not."""
    return Verdict(what, difference <= TOLERANCE, f"largest relative difference {difference:.1e}")


def judge_list(what: str, ours: list[int], theirs: list[int], detail: str) -> Verdict:
    """Equal entry by entry, or where they part."""
    if ours == theirs:
        return Verdict(what, True, detail)
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return Verdict(what, False, f"differ from entry {first}: helixctl {ours[first:][:6]}, judge {theirs[first:][:6]}")


def relative(one: Tensor, other: Tensor) -> float:
    """Largest difference, each over its own value plus the mean value; infinite where shapes differ.

    Not over the largest value: single dimensions of a real target's features are a thousand times the others.
    """
    if one.shape != other.shape:
        return float("inf")
    size = other.abs()
    return float(((one - other).abs() / (size + size.mean())).max())


def report(judge: str, verdicts: list[Verdict], path: Path | None) -> int:
    """Print the table and the JSON."""
    width = max(len(v.what) for v in verdicts)
    for v in verdicts:
        print(f"{v.what:<{width}}  {'equal' if v.equal else 'DIFFERS':<8} {v.detail}")
    result = {
        "judge": judge,
        "equal": all(v.equal for v in verdicts),
        "verdicts": [asdict(v) for v in verdicts],
    }
    text = json.dumps(result)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    return 0 if result["equal"] else 1
