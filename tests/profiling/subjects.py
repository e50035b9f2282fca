"""Processes to look at, and recordings and facts made by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helixctl.profiling.facts import Facts, RoleFacts, StageFacts
from helixctl.profiling.owners import Crew, role_of
from helixctl.profiling.pipeline import ChannelUse, PipelineUse, StageFlow
from tests.conftest import ROOT

STAGES = ("reader-0", "target-0", "target-0-post", "drafter-0")


@contextmanager
def synthetic(kind: str, seed: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a pipeline of ``kind``; it is gone afterwards."""
    words = [sys.executable, "-m", "tests.profiling.synthetic", kind, str(seed), str(folder)]
    child = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has printed a line, so that it is at work."""
    child = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def status(at_s: float, *, received: int = 0, tokens: int = 0, **changes: Any) -> dict[str, Any]:
    """A reading of status.json of one reader, target, postprocess thread and drafter."""
    ends = [("work", 0, 1), ("target-0-out", 1, 2), ("features", 2, 3)]
    links = [link(name, STAGES[i], STAGES[j], received, at_s) for name, i, j in ends]
    content = {
        "schema": 1,
        "pid": 7,
        "phase": "running",
        "error": None,
        "spent_s": 0.001 * at_s,
        "counters": {"step": received // 4, "trained_tokens": tokens, "devices": {"drafter-0": "cpu"}},
        "at_s": at_s,
        "stages": [{"name": name, "thread_id": 100 + i, "state": "running"} for i, name in enumerate(STAGES)],
        "links": links,
        "slots": {
            "name": "slots",
            "num_slots": 4,
            "acquired": received + 2,
            "released": received,
            "wait_s": 0.0,
        },
        "waiters": [],
    }
    return {**content, **changes}


def link(name: str, sender: str, receiver: str, received: int, at_s: float) -> dict[str, Any]:
    """A channel that has always been empty and that nobody has waited at."""
    channel = {
        "name": name,
        "capacity": 2,
        "sent": received,
        "received": received,
        "send_wait_s": 0.0,
        "receive_wait_s": 0.0,
        "occupancy": [at_s, 0.0, 0.0],
        "max_occupancy": 1,
        "held_bytes": 0,
        "max_held_bytes": 0,
    }
    return {"channel": channel, "senders": [sender], "receivers": [receiver]}


def stage_facts(name: str, **changes: Any) -> StageFacts:
    """A stage that does nothing remarkable."""
    usual: dict[str, Any] = {
        "name": name,
        "role": role_of(name),
        "num_threads": 1,
        "cores": 0.1,
        "system_share": 0.0,
        "on_cpu_share": 0.1,
        "run_queue_share": 0.0,
        "blocked_share": 0.9,
        "voluntary_per_s": 10.0,
        "minor_faults_per_s": 0.0,
        "gil_share": 0.05,
        "leaf_shares": {},
        "top_frames": (),
        "waiting_frames": (),
    }
    return StageFacts(**{**usual, **changes})


def channel_use(name: str, sender: str, receiver: str, **changes: Any) -> ChannelUse:
    """A channel half full."""
    usual: dict[str, Any] = {
        "name": name,
        "senders": (sender,),
        "receivers": (receiver,),
        "capacity": 2,
        "items_per_s": 10.0,
        "received": 300,
        "mean_held": 1.0,
        "empty_share": 0.3,
        "full_share": 0.3,
        "send_wait_share": 0.0,
        "receive_wait_share": 0.0,
        "send_wait_s": 0.0,
        "receive_wait_s": 0.0,
        "held": 1,
    }
    return ChannelUse(**{**usual, **changes})


def facts(waits: dict[str, tuple[float, float]], stages: dict[str, StageFacts] | None = None, **changes: Any) -> Facts:
    """Facts of half a minute; ``waits`` holds the shares starved and held back of each role."""
    names = dict(zip(("reader", "target", "post", "drafter"), STAGES, strict=True))
    own = {name: (stages or {}).get(name, stage_facts(name)) for name in STAGES}
    roles = tuple(
        RoleFacts(role, StageFlow(role, (names[role],), *waits[role], 10.0), (own[names[role]],)) for role in waits
    )
    ends = [("work", 0, 1), ("target-0-out", 1, 2), ("features", 2, 3)]
    channels = tuple(channel_use(name, STAGES[i], STAGES[j]) for name, i, j in ends)
    usual: dict[str, Any] = {
        "seconds": 30.0,
        "ticks": 600,
        "error_share": 0.0,
        "stacks_problem": None,
        "crew": Crew(STAGES),
        "stages": tuple(own.values()),
        "threads": (),
        "pipeline": PipelineUse(30.0, channels, 0.0, 4, 0.5, 2.0, 1000.0, 0.0),
        "roles": roles,
        "gil_share": 0.2,
        "stalls": None,
        "gpus": (),
        "host": None,
        "slowdown": None,
        "profiler_cores": 0.02,
        "vanished": (),
        "failure": None,
        "warmed_up": True,
    }
    return Facts(**{**usual, **changes})


TARGET_BOUND = {"reader": (0.0, 0.6), "target": (0.0, 0.01), "post": (0.9, 0.0), "drafter": (0.7, 0.0)}
DRAFTER_BOUND = {"reader": (0.0, 0.8), "target": (0.7, 0.0), "post": (0.9, 0.0), "drafter": (0.01, 0.0)}
READER_BOUND = {"reader": (0.0, 0.0), "target": (0.8, 0.0), "post": (0.9, 0.0), "drafter": (0.8, 0.0)}
EVEN = {"reader": (0.0, 0.5), "target": (0.03, 0.02), "post": (0.9, 0.0), "drafter": (0.04, 0.0)}
EVERYBODY_WAITS = {"reader": (0.0, 0.7), "target": (0.5, 0.0), "post": (0.9, 0.0), "drafter": (0.5, 0.0)}
