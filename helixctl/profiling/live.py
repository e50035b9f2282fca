"""What a process does right now, again and again: threads with their stages, and the pipeline of a run of ours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from helixctl.profiling import pipeline, threads
from helixctl.profiling.owners import Crew
from helixctl.profiling.pipeline import PipelineUse, Status, StatusReader
from helixctl.profiling.runs import Run, Watch
from helixctl.profiling.threads import ThreadSample, ThreadUse, read_threads


@dataclass(frozen=True)
class Look:
    """The time between two looks."""

    seconds: float
    uses: tuple[tuple[str, ThreadUse], ...]
    """Owner and use of every thread, busiest first."""
    pipeline: PipelineUse | None
    step: int | None


def looks(run: Run, every_s: float, longest_s: float | None = None) -> Iterator[Look]:
    """A look every ``every_s`` seconds until the process ends, or ``longest_s`` have passed."""
    watch = Watch(run.pid)
    reader = StatusReader(run.run_dir, run.pid) if run.run_dir is not None else None
    before = ThreadSample(time.monotonic(), read_threads(run.pid))
    status = reader.read() if reader is not None else None
    end = None if longest_s is None else before.at_s + longest_s
    try:
        while not watch.ended_within(every_s) and (end is None or time.monotonic() < end + every_s / 2):
            now = ThreadSample(time.monotonic(), read_threads(run.pid))
            newer = (reader.read() or status) if reader is not None else None
            yield _look(run.pid, before, now, status, newer)
            before, status = now, newer
    finally:
        watch.close()


def _look(pid: int, before: ThreadSample, now: ThreadSample, old: Status | None, new: Status | None) -> Look:
    crew = pipeline.crew_of(new) if new is not None else Crew()
    uses = threads.use_between(before, now)
    has_news = old is not None and new is not None and new["at_s"] > old["at_s"]
    return Look(
        seconds=now.at_s - before.at_s,
        uses=tuple((crew.owner(use.thread_id, use.name, pid), use) for use in uses),
        pipeline=pipeline.use_between(old, new) if has_news and old is not None and new is not None else None,
        step=int(new["counters"].get("step", 0)) if new is not None else None,
    )
