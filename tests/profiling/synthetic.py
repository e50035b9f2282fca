"""Pipelines with a known culprit, as a process to look at: `python -m tests.profiling.synthetic KIND SEED FOLDER`.

The engine is the real one: reader, target, postprocess thread and drafter, channels, slots, status file and run.pid.
Only the work is made up: waiting, Python code, or hashing, which needs a core but not the GIL. Sizes are drawn from the
seed. Ends by itself after a while, so that a test that died leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from helixctl.engine.channel import Channel, OrderedChannel
from helixctl.engine.slots import SlotPool
from helixctl.engine.stats import Link, take_stats
from helixctl.engine.status import FILE_NAME, StatusFile
from helixctl.engine.supervisor import Limits, Progress, Supervisor
from helixctl.engine.waiting import Cancellable
from tests.engine.stages import FakeStage

LIFE_S = 20.0
NEVER = threading.Event()
BLOCK = bytes(1 << 16)

Work = Callable[[], object]


def waiting(seconds: float) -> Work:
    return lambda: NEVER.wait(seconds)


def python(seconds: float) -> Work:
    def spin() -> int:
        number, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            number += 1
        return number

    return spin


def hashing(blocks: int) -> Work:
    def digest() -> None:
        for _ in range(blocks):
            hashlib.sha256(BLOCK)

    return digest


def failing(after: int) -> Work:
    seen: list[int] = []

    def work() -> None:
        NEVER.wait(0.004)
        seen.append(1)
        if len(seen) > after:
            raise KeyError("loss_mask")

    return work


def pausing(work: Work, pause_s: float, every_s: float) -> Work:
    due_at = time.monotonic() + every_s

    def both() -> None:
        nonlocal due_at
        work()
        if time.monotonic() >= due_at:
            NEVER.wait(pause_s)
            due_at = time.monotonic() + every_s

    return both


def hanging(after: int) -> Work:
    seen: list[int] = []

    def work() -> None:
        seen.append(1)
        NEVER.wait(0.004 if len(seen) <= after else LIFE_S)

    return work


@dataclass(frozen=True)
class Plan:
    """What each stage does with an item."""

    reader: Work
    target: Work
    drafter: Work
    hogs: int = 0
    """Threads that hash for ever."""
    one_core: bool = False

    def but(self, stage: str, work: Work) -> Plan:
        """This plan with other work for one stage."""
        works = {"reader": self.reader, "target": self.target, "drafter": self.drafter, stage: work}
        return Plan(works["reader"], works["target"], works["drafter"])


def make_plan(kind: str, seed: int) -> Plan:
    """The pipeline of ``kind`` with sizes of its own."""
    draw = random.Random(seed)
    quick_s = draw.uniform(0.002, 0.004)
    slow_s = quick_s * draw.uniform(4.0, 8.0)
    quick = waiting(quick_s)
    plain = Plan(quick, quick, quick)
    plans: dict[str, Callable[[], Plan]] = {
        "slow-reader": lambda: replace(plain, reader=waiting(slow_s)),
        "slow-target-python": lambda: replace(plain, target=python(slow_s)),
        "slow-target-sleep": lambda: replace(plain, target=waiting(slow_s)),
        "slow-drafter": lambda: replace(plain, drafter=waiting(slow_s)),
        "starved-cpu": lambda: replace(
            plain, target=hashing(draw.randint(40, 80)), hogs=draw.randint(4, 6), one_core=True
        ),
        "dies": lambda: plain.but(draw.choice(["reader", "target", "drafter"]), failing(draw.randint(80, 160))),
        "hangs": lambda: plain.but(draw.choice(["target", "drafter"]), hanging(draw.randint(20, 40))),
        "periodic-stall": lambda: replace(
            plain, drafter=pausing(quick, draw.uniform(0.3, 0.4), draw.uniform(0.4, 0.5))
        ),
        "balanced": lambda: replace(plain, target=waiting(slow_s), drafter=waiting(slow_s)),
        "two-culprits": lambda: Plan(waiting(slow_s), waiting(slow_s), quick),
    }
    return plans[kind]()


class Pipeline:
    """Reader, target, postprocess thread and drafter around ``plan``."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.end = time.monotonic() + LIFE_S
        self.work: Channel[int] = Channel("work", 2)
        self.captured: Channel[int] = Channel("target-0-out", 2)
        self.slots: SlotPool[int] = SlotPool("slots", [list(range(8))])
        self.features: OrderedChannel[int] = OrderedChannel("features", 8)
        self.done = 0

    def read(self) -> None:
        for seq in count():
            if time.monotonic() >= self.end:
                break
            self.slots.acquire(seq)
            self.plan.reader()
            self.work.send(seq)
        self.work.close()

    def target(self) -> None:
        for seq in self.work:
            self.plan.target()
            self.captured.send(seq)
        self.captured.close()

    def post(self) -> None:
        for seq in self.captured:
            self.features.send(seq, seq)
        self.features.close()

    def draft(self) -> None:
        for seq in self.features:
            self.plan.drafter()
            self.done += 1
            self.slots.release(seq)

    def hog(self) -> None:
        while time.monotonic() < self.end:
            hashing(20)()

    def counters(self) -> dict[str, Any]:
        return {"step": self.done // 4, "trained_tokens": 512 * self.done, "devices": {"drafter-0": "cpu"}}


def run(plan: Plan, run_dir: Path) -> None:
    """Build the pipeline and run it to its end."""
    pipe = Pipeline(plan)
    for _ in range(plan.hogs):
        threading.Thread(target=pipe.hog, name="hog", daemon=True).start()
    stages = [
        [FakeStage("drafter-0", pipe.draft)],
        [FakeStage("target-0", pipe.target), FakeStage("target-0-post", pipe.post)],
        [FakeStage("reader-0", pipe.read)],
    ]
    links = [
        Link(pipe.work, ("reader-0",), ("target-0",)),
        Link(pipe.captured, ("target-0",), ("target-0-post",)),
        Link(pipe.features, ("target-0-post",), ("drafter-0",)),
    ]
    progress = Progress()
    watched: list[Cancellable] = [pipe.slots, pipe.work, pipe.captured, pipe.features]
    supervisor = Supervisor(stages, watched, Limits(20, 30), progress=progress)
    status = StatusFile(run_dir / FILE_NAME, lambda: take_stats(supervisor, links, pipe.slots), pipe.counters)
    progress.listen(status.write, 0.1)
    try:
        supervisor.run()
    except BaseException as error:
        status.finish(error)
        raise
    status.finish()


def main() -> None:
    """Hold run.pid as a run does, and run."""
    kind, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(kind, seed)
    if plan.one_core:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with (folder / "run.pid").open("w") as held:
        held.write(f"{os.getpid()}\n")
        held.flush()
        run(plan, folder)


if __name__ == "__main__":
    main()
