"""The report: one JSON document with a versioned schema, from which the table, the CSVs and the page are made.

Version 1. Fields are only ever added; a change of meaning raises the version.
"""

from __future__ import annotations

import dataclasses
import platform
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from helixctl.profiling import pipeline, threads
from helixctl.profiling.facts import Facts, GpuFacts, StageFacts
from helixctl.profiling.finding import Finding, Verdict
from helixctl.profiling.owners import in_order
from helixctl.profiling.recording import Recording
from helixctl.version import __version__

SCHEMA_VERSION = 1
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class About:
    """What was profiled, and how."""

    mode: str
    """recipe, pid or threads."""
    command: str
    """Command line of the profiled process."""
    notes: tuple[str, ...] = ()
    """What a reader of the report should know."""


def make_report(seen: Recording, facts: Facts, verdict: Verdict, about: About) -> Json:
    """Everything that was found, in plain values; instants are seconds since the beginning of the window."""
    return {
        "schema_version": SCHEMA_VERSION,
        "helixctl_version": __version__,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "about": {**dataclasses.asdict(about), "pid": seen.pid, "run_dir": str(seen.run_dir or "")},
        "window": _window(seen, facts),
        "verdict": _verdict(verdict),
        "stages": [_stage(stage, facts) for stage in facts.stages],
        "threads": [{"owner": owner, **dataclasses.asdict(use)} for owner, use in facts.threads],
        "channels": [dataclasses.asdict(channel) for channel in facts.pipeline.channels] if facts.pipeline else [],
        "pipeline": _pipeline(facts),
        "gil_share": facts.gil_share,
        "gpus": [dataclasses.asdict(gpu) for gpu in facts.gpus],
        "gpu_problem": seen.gpu_problem,
        "cuda": _cuda(facts),
        "host": dataclasses.asdict(facts.host) if facts.host is not None else None,
        "cost": _cost(seen, facts),
        "series": _series(seen, facts),
    }


def _window(seen: Recording, facts: Facts) -> Json:
    opened, began = seen.opened_at, seen.baseline_at
    return {
        "seconds": facts.seconds,
        "set_up_s": opened - seen.started_at if opened is not None else 0.0,
        "warm_up_s": began - opened if began is not None and opened is not None else 0.0,
        "baseline_s": seen.window_at - began if began is not None else 0.0,
        "looks_at_threads": len(seen.threads),
        "looks_at_stacks": facts.ticks,
        "late_looks": seen.stacks.late_samples,
        "failed_looks": seen.stacks.errors,
        "ended_early": seen.has_ended,
    }


def _verdict(verdict: Verdict) -> Json:
    return {
        "code": verdict.headline.code,
        "cause": verdict.cause.code if verdict.cause is not None else None,
        "title": verdict.title,
        "level": verdict.headline.level,
        "confidence": verdict.confidence,
        "basis": verdict.basis,
        "unknown": list(verdict.unknown),
        "findings": [_finding(finding) for finding in verdict.findings],
    }


def _finding(finding: Finding) -> Json:
    return {**dataclasses.asdict(finding), "detail": list(finding.detail)}


def _stage(stage: StageFacts, facts: Facts) -> Json:
    flow = next((role.flow for role in facts.roles if stage.name in role.flow.stages), None)
    content = dataclasses.asdict(stage)
    if flow is not None:
        content |= {
            "in_wait_share": flow.in_wait_share,
            "out_wait_share": flow.out_wait_share,
            "busy_share": flow.busy_share,
            "items_per_s": flow.items_per_s / len(flow.stages),
        }
    return content


def _pipeline(facts: Facts) -> Json | None:
    if facts.pipeline is None:
        return None
    use = facts.pipeline
    return {
        "tokens_per_s": use.tokens_per_s,
        "steps_per_s": use.steps_per_s,
        "slot_wait_s": use.slot_wait_s,
        "num_slots": use.num_slots,
        "free_slots_share": use.free_slots_share,
        "stalls": dataclasses.asdict(facts.stalls) if facts.stalls is not None else None,
    }


def _cuda(facts: Facts) -> Json | None:
    """The trace of kernels and CUDA calls; each stage's part stands with the stage. None where it was not asked for."""
    if facts.cuda is None:
        return None if facts.cuda_problem is None else {"problem": facts.cuda_problem}
    devices = [dataclasses.asdict(device) for device in facts.cuda.devices]
    seconds, lost = facts.cuda.seconds, facts.cuda_slowdown_share
    return {"problem": None, "seconds": seconds, "slowdown_share": lost, "devices": devices}


def _cost(seen: Recording, facts: Facts) -> Json:
    cores = facts.host.num_cores if facts.host is not None else 1
    loss = facts.slowdown
    return {
        "profiler_cpu_s": seen.own_cpu_s,
        "pyspy_cpu_s": seen.stacks.cpu_s + seen.gil.cpu_s,
        "cores": facts.profiler_cores,
        "share_of_machine": facts.profiler_cores / cores,
        "status_file_share": facts.pipeline.status_cost_share if facts.pipeline else None,
        "tokens_per_s_before": loss.tokens_per_s_before if loss else None,
        "slowdown_share": loss.share if loss else None,
        "slowdown_error_share": loss.error_share if loss else None,
    }


def _series(seen: Recording, facts: Facts) -> Json:
    return {
        "threads": _thread_series(seen, facts),
        "channels": _channel_series(seen),
        "gpus": _gpu_series(seen, facts.gpus),
    }


def _thread_series(seen: Recording, facts: Facts) -> Json:
    """Cores in use and threads ready without one, of every stage, between neighbouring looks."""
    at_s, rows = [], []
    for first, last in pairwise(seen.threads):
        sums: dict[str, list[threads.ThreadUse]] = defaultdict(list)
        for use in threads.use_between(first, last):
            sums[facts.crew.owner(use.thread_id, use.name, seen.pid)].append(use)
        at_s.append(round(last.at_s - seen.window_at, 3))
        rows.append({name: _shares(uses) for name, uses in sums.items()})
    names = in_order(sorted({name for row in rows for name in row}))
    return {"at_s": at_s, "owners": {name: [row.get(name) for row in rows] for name in names}}


def _shares(uses: Sequence[threads.ThreadUse]) -> list[float]:
    """Cores in use, and threads that are ready without a core."""
    ready = sum(use.run_queue_share or 0.0 for use in uses)
    return [round(sum(use.on_cpu_share for use in uses), 3), round(ready, 3)]


def _channel_series(seen: Recording) -> Json:
    window = seen.window_statuses
    uses = [pipeline.use_between(first, last) for first, last in pairwise(window)]
    at_s = [round(status["at_s"] - seen.window_at, 3) for status in window[1:]]
    names = [channel.name for channel in uses[0].channels] if uses else []
    return {
        "at_s": at_s,
        "capacity": {channel.name: channel.capacity for channel in uses[0].channels} if uses else {},
        "held": {name: [round(use.channels[i].mean_held, 3) for use in uses] for i, name in enumerate(names)},
        "tokens_per_s": [round(use.tokens_per_s, 1) for use in uses],
        "items_per_s": [round(use.channels[-1].items_per_s, 2) if use.channels else 0 for use in uses],
    }


def _gpu_series(seen: Recording, gpus: Sequence[GpuFacts]) -> Json:
    series: Json = {}
    for gpu in gpus:
        samples = [sample for sample in seen.gpus if sample.uuid == gpu.uuid]
        metrics = sorted({name for sample in samples for name in sample.values})
        series[gpu.uuid] = {
            "at_s": [round(sample.at_s - seen.window_at, 3) for sample in samples],
            "metrics": {name: [sample.values.get(name) for sample in samples] for name in metrics},
        }
    return series
