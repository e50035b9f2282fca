"""What became of the drafts at every position of a block, and means over answers. Nothing here runs a model.

A cycle verifies drafts 1, 2, ... of a block and accepts a leading part of them. A draft is *judged* when its fate is
known (those behind a stop token are not), and *reached* when all before it were accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from helixctl.decoding.decoded import Decoded


@dataclass(frozen=True)
class PositionAcceptance:
    """One position of the block, over all cycles."""

    position: int
    """1 is the first draft behind the anchor."""
    judged: int
    """Cycles whose draft here was judged."""
    reached: int
    """Those of them whose earlier drafts were all accepted."""
    accepted: int
    """Those of them whose draft here was accepted."""

    @property
    def share(self) -> float:
        """Accepted of judged: what engines call acceptance per position. Never rises with the position."""
        return self.accepted / self.judged if self.judged else 0.0

    @property
    def conditional(self) -> float:
        """Accepted of reached: how good the drafter is here, once it got here."""
        return self.accepted / self.reached if self.reached else 0.0


def acceptance_by_position(answers: Iterable[Decoded]) -> tuple[PositionAcceptance, ...]:
    """Every position that was judged at least once, in order."""
    judged, reached, accepted = Counter[int](), Counter[int](), Counter[int]()
    for answer in answers:
        for num_kept, num_drafts in judged_cycles(answer):
            judged.update(range(1, num_drafts + 1))
            reached.update(range(1, min(num_drafts, num_kept + 1) + 1))
            accepted.update(range(1, num_kept + 1))
    return tuple(PositionAcceptance(k, judged[k], reached[k], accepted[k]) for k in sorted(judged))


def judged_cycles(answer: Decoded) -> Iterator[tuple[int, int]]:
    """Accepted and judged drafts of every cycle."""
    last = len(answer.accepted) - 1
    for cycle, (emitted, num_drafts) in enumerate(zip(answer.accepted, answer.judged, strict=True)):
        yield emitted - (cycle < last or answer.last_is_bonus), num_drafts
