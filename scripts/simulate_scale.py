"""How a run would go on more GPUs: the pipeline of every process simulated from stage costs measured in one run.

    python -m scripts.simulate_scale REPORT.json [--parameters N] [--gpus 1 8 64 512]
    python -m scripts.simulate_scale --costs 0.282 0.514 12288

REPORT is that of `helixctl profile`, of a run whose stages have what they need for themselves (a GPU each, free cores).
First the run itself is simulated and compared with what was measured; then every way to split hosts is tried. Costs can
be given instead: seconds of a target and of a drafter for a micro-batch, and its tokens. The
simulation follows the rules of the engine: slots in sequence order, whichever target is free, drafters in turn, all
drafters at the end of a step.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STEPS = 60
_WARM_UP = 10
"""Steps that do not count: the pipeline fills."""
_BYTES = 4
"""Of a gradient: float32."""


@dataclass(frozen=True)
class Costs:
    """Seconds per micro-batch, and what it holds."""

    read_s: float
    target_s: float
    post_s: float
    drafter_s: float
    """Its share of the optimizer step included."""
    tokens: float
    spread: float = 0.05
    """Standard deviation of each over its mean."""


@dataclass(frozen=True)
class Layout:
    """What runs where."""

    processes: int
    targets: int
    """Of each process, as all below."""
    drafters: int
    slots: int
    accumulate: int = 1
    shared: bool = False
    """Target and drafter share one GPU and take turns."""

    @property
    def gpus(self) -> int:
        """Of all processes."""
        return self.processes * (1 if self.shared else self.targets + self.drafters)

    @property
    def name(self) -> str:
        """For the table."""
        own = "1 GPU" if self.shared else f"{self.targets}:{self.drafters}"
        return f"{self.processes} x {own}"


@dataclass(frozen=True)
class Links:
    """What gradients travel over."""

    in_host_bytes_per_s: float = 400e9
    between_bytes_per_s: float = 50e9
    """Of one host, both ways at once."""
    latency_s: float = 20e-6
    gpus_per_host: int = 8


@dataclass(frozen=True)
class Outcome:
    """What a simulation says; shares are of the time."""

    tokens_per_s: float
    target_busy: float
    drafter_busy: float
    reduce_share: float
    shared: bool = False
    """Target and drafter take turns on one GPU."""

    @property
    def limit(self) -> str:
        """What to make faster first."""
        busy = {"targets": self.target_busy, "drafters": self.drafter_busy, "adding up": self.reduce_share}
        if self.shared:
            busy["both on one GPU"] = busy.pop("targets") + busy.pop("drafters")
        name = max(busy, key=lambda key: busy[key])
        return f"{name}, {100 * busy[name]:.0f} %"


def reduce_seconds(parameters: int, layout: Layout, links: Links) -> float:
    """Time to add up gradients at the end of a step: within each process, then a ring over all processes."""
    size = _BYTES * parameters
    inside = 2 * (layout.drafters - 1) * size / links.in_host_bytes_per_s
    if layout.processes == 1:
        return inside
    is_one_host = layout.gpus <= links.gpus_per_host
    speed = links.in_host_bytes_per_s if is_one_host else links.between_bytes_per_s
    ring = 2 * (layout.processes - 1) / layout.processes * size / speed
    return inside + ring + 2 * math.ceil(math.log2(layout.processes)) * links.latency_s


def simulate(costs: Costs, layout: Layout, reduce_s: float, steps: int = STEPS, seed: int = 0) -> Outcome:
    """Run ``steps`` steps of all processes."""
    chance = random.Random(seed)
    processes = [Process(costs, layout, chance) for _ in range(layout.processes)]
    now, began = 0.0, 0.0
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            began = now
            for process in processes:
                process.target_s = process.drafter_s = 0.0
        now = max(process.step() for process in processes) + reduce_s
        for process in processes:
            process.wait_for_others(now)
    seconds, batches = now - began, steps * layout.accumulate * layout.drafters * layout.processes
    loops = layout.processes * seconds
    return Outcome(
        tokens_per_s=batches * costs.tokens / seconds,
        target_busy=sum(p.target_s for p in processes) / loops / layout.targets,
        drafter_busy=sum(p.drafter_s for p in processes) / loops / layout.drafters,
        reduce_share=steps * reduce_s / seconds,
        shared=layout.shared,
    )


class Process:
    """The pipeline of one process: when each of its threads is free again."""

    def __init__(self, costs: Costs, layout: Layout, chance: random.Random) -> None:
        self._costs, self._layout, self._chance = costs, layout, chance
        self._reader_free = 0.0
        self._target_free = [0.0] * layout.targets
        self._post_free = [0.0] * layout.targets
        self._drafter_free = [0.0] * layout.drafters
        self._slot_free = [0.0] * layout.slots * layout.drafters
        self._place = 0
        self.target_s = 0.0
        self.drafter_s = 0.0

    def step(self) -> float:
        """One step's micro-batches; the instant at which the last drafter is done."""
        for _ in range(self._layout.accumulate * self._layout.drafters):
            self._micro_batch()
        return max(self._drafter_free)

    def wait_for_others(self, instant: float) -> None:
        """The step is over for all at ``instant``."""
        self._drafter_free = [instant] * self._layout.drafters

    def _micro_batch(self) -> None:
        costs, layout = self._costs, self._layout
        slot = self._place % len(self._slot_free)
        read = max(self._reader_free, self._slot_free[slot]) + self._around(costs.read_s)
        self._reader_free = read
        target = min(range(layout.targets), key=lambda i: self._target_free[i])
        drafter = self._place % layout.drafters
        free = max(self._target_free[target], self._drafter_free[drafter] if layout.shared else 0.0)
        target_s, drafter_s = self._around(costs.target_s), self._around(costs.drafter_s)
        computed = max(read, free) + target_s
        copied = max(computed, self._post_free[target]) + self._around(costs.post_s)
        done = max(copied, self._drafter_free[drafter]) + drafter_s
        self._target_free[target], self._post_free[target] = (done if layout.shared else computed), copied
        self._drafter_free[drafter] = self._slot_free[slot] = done
        self.target_s += target_s
        self.drafter_s += drafter_s
        self._place += 1

    def _around(self, mean_s: float) -> float:
        return mean_s * max(self._chance.gauss(1.0, self._costs.spread), 0.1) if self._costs.spread else mean_s


def layouts(num_gpus: int, links: Links, accumulate: int = 1) -> Iterator[Layout]:
    """Ways to use so many GPUs: every process alike, none larger than a host."""
    yield Layout(num_gpus, 1, 1, 3, accumulate, shared=True)
    for size in (2, 4, 8):
        if num_gpus % size or size > links.gpus_per_host:
            continue
        for drafters in range(1, size):
            targets = size - drafters
            advised = math.ceil((2 * targets + drafters) / drafters)
            yield Layout(num_gpus // size, targets, drafters, advised, accumulate)


def best(costs: Costs, num_gpus: int, parameters: int, links: Links, accumulate: int = 1) -> tuple[Layout, Outcome]:
    """The fastest layout of so many GPUs; few steps choose, many measure."""
    quick = replace(costs, spread=0.0)

    def speed(layout: Layout) -> float:
        one, reduce_s = replace(layout, processes=1), reduce_seconds(parameters, layout, links)
        return layout.processes * simulate(quick, one, reduce_s, 20).tokens_per_s

    chosen = max(layouts(num_gpus, links, accumulate), key=speed)
    return chosen, simulate(costs, chosen, reduce_seconds(parameters, chosen, links))


def read_report(report: dict[str, Any]) -> tuple[Costs, Layout, float]:
    """Costs and layout of a profiled run, and its measured tokens per second."""
    stages: dict[str, list[dict[str, Any]]] = {}
    for stage in report["stages"]:
        stages.setdefault(stage["role"], []).append(stage)
    seconds = {
        role: sum(stage["busy_share"] for stage in own) / max(sum(stage["items_per_s"] for stage in own), 1e-9)
        for role, own in stages.items()
        if "busy_share" in own[0]
    }
    flow, drafters = report["pipeline"], len(stages["drafter"])
    items_per_s = sum(stage["items_per_s"] for stage in stages["drafter"])
    costs = Costs(
        read_s=seconds["reader"] / len(stages["reader"]),
        target_s=seconds["target"],
        post_s=seconds["post"],
        drafter_s=seconds["drafter"],
        tokens=flow["tokens_per_s"] / items_per_s,
        spread=0.0,
    )
    accumulate = max(round(items_per_s / flow["steps_per_s"] / drafters), 1)
    layout = Layout(1, len(stages["target"]), drafters, flow["num_slots"] // drafters, accumulate)
    return costs, layout, flow["tokens_per_s"]


def main(words: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("--costs", type=float, nargs=3, metavar=("TARGET_S", "DRAFTER_S", "TOKENS"))
    parser.add_argument("--parameters", type=float, default=0.5e9, help="trained parameters of the drafter")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--spread", type=float, default=0.05, help="standard deviation of stage costs over their mean")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a drafter in a step")
    parser.add_argument("--network-gb-per-s", type=float, default=50.0, help="of one host")
    given = parser.parse_args(words)
    if (given.report is None) == (given.costs is None):
        parser.error("give a report, or --costs")
    console = Console(width=100)
    if given.costs is not None:
        target_s, drafter_s, tokens = given.costs
        costs = Costs(0.0, target_s, 0.0, drafter_s, tokens)
    else:
        costs, layout, measured = read_report(json.loads(given.report.read_text(encoding="utf-8")))
        found = simulate(costs, layout, 0.0)
        console.print(
            f"the run itself ({layout.targets}:{layout.drafters}): simulated {found.tokens_per_s:,.0f} tokens/s, "
            f"measured {measured:,.0f}, {100 * (found.tokens_per_s / measured - 1):+.1f} %"
        )
    console.print(
        f"per micro-batch of {costs.tokens:,.0f} tokens: target {1e3 * costs.target_s:.4g} ms, drafter "
        f"{1e3 * costs.drafter_s:.4g} ms, copies {1e3 * costs.post_s:.4g} ms, reader {1e3 * costs.read_s:.4g} ms"
    )
    links = Links(between_bytes_per_s=given.network_gb_per_s * 1e9)
    console.print(scale_table(replace(costs, spread=given.spread), given, links))
    return 0


def scale_table(costs: Costs, given: argparse.Namespace, links: Links) -> Table:
    """The fastest layout of every size; efficiency is against the speed per GPU of the first."""
    table = Table(box=None, pad_edge=False)
    for name in ("GPUs", "processes x targets:drafters", "tokens/s", "efficiency", "limit", "adding up"):
        table.add_column(name, justify="left" if name in ("processes x targets:drafters", "limit") else "right")
    alone = 0.0
    for size in given.gpus:
        layout, found = best(costs, size, int(given.parameters), links, given.accumulate)
        alone = alone or found.tokens_per_s / size
        share, each = f"{100 * found.reduce_share:.1f} %", found.tokens_per_s / size / alone
        table.add_row(str(size), layout.name, f"{found.tokens_per_s:,.0f}", f"{each:.2f}", found.limit, share)
    return table


if __name__ == "__main__":
    sys.exit(main())
