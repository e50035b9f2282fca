"""Verdicts: which stage limits the pipeline, and why. Rules V0 to V8, each with its numbers and an advice.

A stage is *busy* while it has work and room; it is starved while it waits for work, held back while it waits for room.
The throughput is that of the stage that is busy most. The order of headlines: a dead stage (V8); too little data (V0),
so that none rests on chance; stalls that take a fifth of the time (V6); then who limits (V1 to V4, V7), and the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from helixctl.profiling.causes import causes, gil_held
from helixctl.profiling.facts import Facts, RoleFacts
from helixctl.profiling.finding import DEFAULTS, Finding, Level, Thresholds, Verdict

_LIMITS = {
    "target": (
        "V1",
        "drafters starved: target-bound",
        "see the cause; more target loops help only if a core or GPU is free",
    ),
    "drafter": (
        "V2",
        "drafter-bound",
        "more drafter devices, a smaller drafter or fewer anchors; targets could be fewer",
    ),
    "reader": ("V3", "loader-bound", "more readers (pipeline.readers), faster storage, or less work per document"),
    "trainer": (
        "V2",
        "trainer-bound",
        "as it should be; larger micro-batches where memory allows, or more GPUs by torchrun",
    ),
    "filler": ("V4", "transfer-bound", "see the cause; rows of tokens are small"),
    "post": ("V4", "transfer-bound", "pin and overlap the copies, fewer taps, or features that stay on their GPU"),
}
_SHARED = tuple("bcdef")
"""Causes that slow a stage nobody waits for: the launch of kernels, waits for a device, memory, the GIL, cores."""
_PLACE = {"reader": 0, "target": 1, "post": 2, "filler": 2, "drafter": 3, "trainer": 3}


def judge(facts: Facts, limits: Thresholds = DEFAULTS) -> Verdict:
    """Apply all rules."""
    basis = _basis(facts)
    facts = _without_doubtful_stacks(facts, limits)
    dead = list(_dead(facts, limits))
    doubts = list(_doubts(facts, limits))
    named = list(_limiting(facts, limits))
    stalls = list(_stalls(facts, limits))
    others = [*_links(facts, limits), *_throttled(facts, limits), *_process(facts, limits)]
    big = [finding for finding in stalls if finding.level == "high"]
    small = [finding for finding in stalls if finding.level != "high"]
    found = [*dead, *doubts, *big, *named, *others, *small]
    if not found:
        found = [_nothing(facts)]
    headline = found[0]
    cause = None
    if headline in named:
        letters = [
            finding
            for finding in named
            if finding.code.startswith(headline.code.split("+")[0]) and finding is not headline
        ]
        told = [finding for finding in letters if headline.code != "V7" or finding.code.endswith(_SHARED)]
        cause = next((finding for finding in told if finding.level == "high"), None)
    unknown = tuple(_unknown(facts, limits))
    return Verdict(headline, cause, tuple(_once(found)), _confidence(facts, limits), basis, unknown)


def _without_doubtful_stacks(facts: Facts, limits: Thresholds) -> Facts:
    """The same without stacks where too many looks failed: pipeline, kernel and GPUs count for themselves.

    A look fails when a stack changes under it, so what is left misses the threads that run most. Only a process without
    a pipeline has nothing but stacks to go by.
    """
    if facts.error_share <= limits.max_errors or not facts.roles:
        return facts
    return replace(
        facts,
        ticks=0,
        error_share=0.0,
        stacks_problem=_failed_looks(facts),
        stages=tuple(stage.without_stacks() for stage in facts.stages),
        roles=tuple(replace(r, stages=tuple(stage.without_stacks() for stage in r.stages)) for r in facts.roles),
        gil_share=None,
    )


def _failed_looks(facts: Facts) -> str:
    return f"{100 * facts.error_share:.0f} % of the looks failed"


def _once(found: list[Finding]) -> Iterator[Finding]:
    """Two stages that limit together have one interpreter lock and may share a GPU: what they share is told once."""
    told: list[tuple[str, dict[str, float | int | str]]] = []
    for finding in found:
        if (finding.title, finding.numbers) not in told:
            told.append((finding.title, finding.numbers))
            yield finding


def _dead(facts: Facts, limits: Thresholds) -> Iterator[Finding]:
    advice = "fix what the run says; its log and traceback name the place"
    if facts.failure is not None:
        named = re.match(r"stage '([^']+)'", facts.failure)
        title = f"dead stage: {named[1]}" if named else "the run failed"
        yield Finding("V8", title, "high", {"failure": facts.failure}, advice)
    for stage in facts.vanished:
        numbers: dict[str, float | int | str] = {"stage": stage}
        yield Finding("V8", f"dead stage: {stage}", "high", numbers, "its thread is gone; " + advice)
    for role in facts.roles if facts.failure is None and facts.pipeline is not None else ():
        yield from _hung(facts, role, limits)


def _hung(facts: Facts, role: RoleFacts, limits: Thresholds) -> Iterator[Finding]:
    """Nothing taken although something lies ready, by a stage that waits for nothing."""
    assert facts.pipeline is not None
    inbound = [c for c in facts.pipeline.channels if set(c.receivers) & set(role.flow.stages)]
    held = sum(channel.held for channel in inbound)
    is_idle = all(channel.received == 0 for channel in inbound)
    if inbound and is_idle and held and role.flow.busy_share >= limits.busy and facts.seconds >= limits.min_seconds:
        frames = [frame for stage in role.stages for frame, _ in (*stage.top_frames, *stage.waiting_frames)[:3]]
        yield Finding(
            "V8",
            f"hung stage: {role.role}",
            "high",
            {"items": 0, "items_waiting": held, "busy_share": role.flow.busy_share, "seconds": facts.seconds},
            "look at where its thread stands: `py-spy dump --pid PID`",
            detail=tuple(frames),
        )


def _doubts(facts: Facts, limits: Thresholds) -> Iterator[Finding]:
    reasons: list[str] = []
    numbers: dict[str, float | int | str] = {"seconds": facts.seconds, "looks": facts.ticks}
    if facts.seconds < limits.min_seconds:
        reasons.append(f"{facts.seconds:.1f} s of at least {limits.min_seconds:g} s")
    if 0 < facts.ticks * (1 + facts.error_share) < limits.min_ticks:
        reasons.append(f"{facts.ticks} looks at the stacks of at least {limits.min_ticks}")
    if facts.error_share > limits.max_errors:
        reasons.append(_failed_looks(facts))
    if not facts.warmed_up:
        reasons.append("set-up was not over")
    loss = facts.slowdown
    is_sure = loss is not None and loss.share - 2 * loss.error_share > limits.max_slowdown
    if loss is not None and is_sure and _profiler_share(facts) >= limits.profiler_share:
        reasons.append(f"the run was {100 * loss.share:.0f} % slower under the profiler")
        numbers["slowdown_share"] = loss.share
    if reasons:
        yield Finding("V0", "INCONCLUSIVE", "high", numbers, "profile longer: --seconds 30", detail=tuple(reasons))


def _profiler_share(facts: Facts) -> float:
    return facts.profiler_cores / (facts.host.num_cores if facts.host is not None else 1)


def _limiting(facts: Facts, limits: Thresholds) -> Iterator[Finding]:
    """V1 to V4 and V7: who is busy most."""
    if not facts.roles or facts.pipeline is None or not any(role.flow.items_per_s for role in facts.roles):
        return
    ranked = sorted(facts.roles, key=lambda role: -role.flow.busy_share)
    top = ranked[0].flow.busy_share
    close = [role for role in ranked if role.flow.busy_share >= top - limits.close and role.role != "post"] or ranked[
        :1
    ]
    computing = [role for role in facts.roles if role.role in ("target", "drafter")]
    if top < limits.busy:
        yield from _nobody_at_limit(facts, limits)
    elif len(computing) > 1 and all(role.flow.busy_share >= limits.busy for role in computing):
        yield _balanced(facts, ranked)
        yield from causes(facts, ranked[0], "V7", limits)
    elif len(close) > 1:
        yield _together(close)
        for role in sorted(close, key=lambda role: _PLACE[role.role]):
            yield from causes(facts, role, _LIMITS[role.role][0], limits)
    else:
        yield _one(facts, ranked)
        yield from causes(facts, ranked[0], _LIMITS[ranked[0].role][0], limits)


def _waits(facts: Facts) -> dict[str, float | int | str]:
    numbers: dict[str, float | int | str] = {}
    for role in facts.roles:
        numbers[f"{role.role}_starved_share"] = role.flow.in_wait_share
        numbers[f"{role.role}_held_back_share"] = role.flow.out_wait_share
    return {name: share for name, share in numbers.items() if share}


def _one(facts: Facts, ranked: list[RoleFacts]) -> Finding:
    code, title, advice = _LIMITS[ranked[0].role]
    numbers: dict[str, float | int | str] = {"busy_share": ranked[0].flow.busy_share, **_waits(facts)}
    assert facts.pipeline is not None
    numbers["last_channel_empty_share"] = facts.pipeline.channels[-1].empty_share
    numbers |= {"next": ranked[1].role, "next_busy_share": ranked[1].flow.busy_share} if len(ranked) > 1 else {}
    return Finding(code, title, "high", numbers, advice)


def _together(close: list[RoleFacts]) -> Finding:
    in_order = sorted(close, key=lambda role: _PLACE[role.role])
    code = "+".join(_LIMITS[role.role][0] for role in in_order)
    names = " and ".join(role.role for role in in_order)
    numbers: dict[str, float | int | str] = {f"{role.role}_busy_share": role.flow.busy_share for role in in_order}
    return Finding(
        code, f"{names} limit together", "high", numbers, "make both faster; one alone gains next to nothing"
    )


def _balanced(facts: Facts, ranked: list[RoleFacts]) -> Finding:
    numbers: dict[str, float | int | str] = {f"{role.role}_busy_share": role.flow.busy_share for role in ranked}
    return Finding(
        "V7",
        "balanced",
        "note",
        {**numbers, "next": ranked[0].role},
        f"nobody waits for long; {ranked[0].role} would be the first to make faster",
    )


def _nobody_at_limit(facts: Facts, limits: Thresholds) -> Iterator[Finding]:
    """Every stage waits a good deal: for a core on its way out of a wait, or for micro-batches to come round."""
    assert facts.pipeline is not None
    hungry = max(facts.roles, key=lambda role: role.run_queue_share or 0.0)
    if (hungry.run_queue_share or 0.0) >= limits.high:
        yield from (finding for finding in causes(facts, hungry, "V1", limits) if finding.code == "V1f")
    first, stalled = facts.roles[0].flow, facts.stalls.share if facts.stalls is not None else 0.0
    if facts.pipeline.num_slots and first.out_wait_share >= limits.high and stalled < limits.moderate:
        shares = {f"{role.role}_busy_share": role.flow.busy_share for role in facts.roles}
        yield Finding(
            "V7s",
            "nobody is at its limit: too few micro-batches in flight",
            "high",
            {"slots": facts.pipeline.num_slots, **shares},
            "more slots (pipeline.slots), so that every stage has one to work on",
        )


def _links(facts: Facts, limits: Thresholds) -> Iterator[Finding]:
    for gpu in facts.gpus:
        limit = gpu.means.get("pcie_limit_bytes_per_s", 0.0)
        rate = max(gpu.means.get("pcie_tx_bytes_per_s", 0.0), gpu.means.get("pcie_rx_bytes_per_s", 0.0))
        if limit and rate >= limits.link * limit:
            numbers: dict[str, float | int | str] = {"pcie_bytes_per_s": rate, "pcie_limit_bytes_per_s": limit}
            yield Finding("V4", f"transfer-bound: PCIe of {gpu.name}", "high", numbers, _LIMITS["post"][2])
    for role in facts.roles:
        share = role.leaf_share("cuda.copy")
        if share >= limits.copy:
            yield Finding("V4", f"transfer-bound: {role.role}", "high", {"copy_share": share}, _LIMITS["post"][2])


def _throttled(facts: Facts, limits: Thresholds) -> Iterator[Finding]:
    for gpu in facts.gpus:
        if gpu.throttled_share >= limits.moderate:
            level: Level = "high" if gpu.throttled_share >= limits.high else "moderate"
            numbers: dict[str, float | int | str] = {"throttled_share": gpu.throttled_share}
            reasons = ", ".join(gpu.throttles)
            yield Finding("V5", f"GPU throttled ({reasons})", level, numbers, "cooling, or a higher power limit")


def _stalls(facts: Facts, limits: Thresholds) -> Iterator[Finding]:
    stalls = facts.stalls
    if stalls is None or stalls.count < 2 or stalls.share < limits.moderate:
        return
    numbers: dict[str, float | int | str] = {
        "stalls": stalls.count,
        "stalled_share": stalls.share,
        "mean_s": stalls.mean_s,
        "role": stalls.role or "",
        "busy_share": stalls.busy_share,
    }
    if stalls.every_s is not None:
        numbers["every_s"] = stalls.every_s
    level: Level = "high" if stalls.share >= limits.high else "moderate"
    advice = f"{stalls.role} does something else meanwhile: checkpoints, validation, logs; do it less often or beside"
    yield Finding("V6", f"periodic stall of the {stalls.role}", level, numbers, advice)


def _process(facts: Facts, limits: Thresholds) -> Iterator[Finding]:
    """A process that is no run of ours: what threads alone can tell."""
    if facts.roles or not facts.stages:
        return
    top = max(facts.stages, key=lambda stage: stage.on_cpu_share)
    queued = max((stage.run_queue_share or 0.0 for stage in facts.stages), default=0.0)
    yield from gil_held(facts, "V1", limits)
    if queued >= limits.high:
        yield Finding("V1f", "CPU-starved", "high", {"run_queue_share": queued}, "fewer threads, or more cores")
    if facts.gil_share is None or facts.gil_share < limits.gil:
        numbers: dict[str, float | int | str] = {"busiest": top.name, "on_cpu_share": top.on_cpu_share}
        detail = tuple(frame for frame, _ in top.top_frames[:3])
        yield Finding(
            "T",
            f"busiest thread: {top.name}",
            "note",
            numbers,
            "no status of a helixctl run can be read (--run-dir names its folder), so there are no stages",
            detail,
        )


def _nothing(facts: Facts) -> Finding:
    waits = _waits(facts)
    return Finding(
        "V0",
        "INCONCLUSIVE",
        "note",
        waits,
        "no rule fits: nobody is at its limit, and nothing shows why; profile longer, with stacks",
    )


def _confidence(facts: Facts, limits: Thresholds) -> Literal["good", "fair", "poor"]:
    if facts.seconds < limits.min_seconds or facts.error_share > limits.max_errors:
        return "poor"
    return "good" if facts.ticks >= limits.min_ticks and facts.seconds >= 1.5 * limits.min_seconds else "fair"


def _basis(facts: Facts) -> str:
    looks = f"{facts.ticks:,} looks at stacks" if facts.ticks else "no stacks"
    return f"{facts.seconds:.0f} s, {looks}, {100 * facts.error_share:.1f} % errors"


def _unknown(facts: Facts, limits: Thresholds) -> Iterator[str]:
    if facts.stacks_problem is not None:
        yield f"which code, and who holds the GIL: {facts.stacks_problem}"
    if facts.stages and all(stage.run_queue_share is None for stage in facts.stages):
        yield "waiting for a core: this kernel does not count it (CONFIG_SCHED_INFO)"
    on_gpu = any(facts.gpu_util_pct(role) is not None for role in facts.roles)
    if on_gpu and not any(role.leaf_share("cuda.launch", "cuda.alloc") for role in facts.roles):
        yield "launch, synchronisation and allocation: --cuda measures them, --native samples them"
    if facts.cuda_problem is not None:
        yield f"kernels and CUDA calls: {facts.cuda_problem}"
    if facts.cuda_slowdown_share > limits.max_slowdown:
        lost = 100 * facts.cuda_slowdown_share
        yield f"shares of kernels and CUDA calls exactly: the run was {lost:.0f} % slower while they were traced"
    if facts.roles and facts.stalls is None:
        yield "stalls: too few micro-batches in the window"
