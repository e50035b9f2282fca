"""Which devices should run what: arithmetic on two measured times. Never imports torch.

Every device works all the time, on one thing at a time: what overlaps beyond that comes on top.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

NEARLY = 0.98
"""A placement with fewer copies of the target or of the drafter is preferred when it is this near to the best."""


@dataclass(frozen=True)
class Pace:
    """Micro-batches alone, each stage with a device to itself."""

    target_s: float
    """Seconds per micro-batch of one target loop; 0 where features are read from disk."""
    drafter_s: float
    """Seconds per micro-batch of one drafter loop, its share of the optimizer step included."""
    tokens: float
    """Real tokens of a micro-batch, on average."""


@dataclass(frozen=True)
class Placement:
    """One way to use the devices, and what it would give."""

    targets: tuple[str, ...]
    drafters: tuple[str, ...]
    tokens_per_s: float
    limit: str
    """target, drafter, or both: which side the other waits for."""
    fits: bool = True
    """Whether the devices' memory holds it."""

    @property
    def together(self) -> bool:
        """Whether targets and drafters share devices."""
        return bool(set(self.targets) & set(self.drafters))

    @property
    def loops(self) -> int:
        """Target and drafter loops, each with weights of its own on its device."""
        return len(self.targets) + len(self.drafters)


def expected(pace: Pace, targets: Sequence[str], drafters: Sequence[str]) -> Placement:
    """What the pipeline gives with these devices.

    With t target devices, M drafters, n drafters on a device and K of them on target devices, r micro-batches a second
    take r x ``drafter_s`` / M of every drafter's time. What K of them leave of the target devices is the targets':
    t = r x (``target_s`` + K / M x ``drafter_s``). And no device can do more than one second's work in a second:
    n x r x ``drafter_s`` <= M.
    """
    shared = sum(device in targets for device in drafters)
    fullest = max(Counter(drafters).values())
    target_work = pace.target_s + shared / len(drafters) * pace.drafter_s
    by_targets = len(set(targets)) / target_work if target_work else math.inf
    by_drafters = len(drafters) / (fullest * pace.drafter_s)
    rate = min(by_targets, by_drafters)
    near = abs(by_targets - by_drafters) <= 0.02 * rate
    limit = "both" if near else "drafter" if by_drafters < by_targets else "both" if shared else "target"
    return Placement(tuple(targets), tuple(drafters), rate * pace.tokens, limit)


def placements(pace: Pace, devices: Sequence[str]) -> Iterator[Placement]:
    """Targets everywhere, with drafters on some of them or on all; and apart in every ratio."""
    for num_drafters in range(1, len(devices) + 1):
        yield expected(pace, devices, devices[-num_drafters:])
    for num_targets in range(1, len(devices)):
        yield expected(pace, devices[:num_targets], devices[num_targets:])


def recommend(found: Sequence[Placement]) -> Placement | None:
    """The fastest that fits; of those nearly as fast the one with the fewest loops. None where nothing fits."""
    fitting = [placement for placement in found if placement.fits]
    if not fitting:
        return None
    best = max(placement.tokens_per_s for placement in fitting)
    good = [placement for placement in fitting if placement.tokens_per_s >= NEARLY * best]
    return min(good, key=lambda placement: (placement.loops, -placement.tokens_per_s))


def check_fit(found: Sequence[Placement], fits: Callable[[Placement], bool]) -> list[Placement]:
    """The same placements, each with what ``fits`` says of it, fastest first."""
    checked = [Placement(p.targets, p.drafters, p.tokens_per_s, p.limit, fits(p)) for p in found]
    return sorted(checked, key=lambda placement: -placement.tokens_per_s)
