"""Why the stage that limits the rest is slow: rules a to h, for whatever kind of stage it is.

Every rule stands alone; the first that fires with level high becomes part of the headline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean

from helixctl.profiling.facts import Facts, RoleFacts
from helixctl.profiling.finding import Finding, Level, Thresholds

Rule = Callable[[Facts, RoleFacts, Thresholds], Iterator[Finding]]


def causes(facts: Facts, role: RoleFacts, code: str, limits: Thresholds) -> Iterator[Finding]:
    """Everything that explains why ``role`` is slow; ``code`` is the rule that named it."""
    for rule in (_gpu_bound, _launch_bound, _sync_bound, _alloc_bound, _gil_bound, _cpu_starved, _computing, _waiting):
        for finding in rule(facts, role, limits):
            yield Finding(
                f"{code}{finding.code}", finding.title, finding.level, finding.numbers, finding.advice, finding.detail
            )


def _level(share: float, limits: Thresholds) -> Level:
    return "high" if share >= limits.high else "moderate"


def _gpu_bound(facts: Facts, role: RoleFacts, limits: Thresholds) -> Iterator[Finding]:
    util = facts.gpu_util_pct(role)
    if util is not None and util >= limits.gpu_full_pct:
        yield Finding(
            "a",
            "GPU-bound",
            "high",
            {"gpu_util_pct": util, "launch_share": role.leaf_share("cuda.launch"), "on_cpu_share": role.on_cpu_share},
            "larger batches, lower precision or more GPUs; a core at 100 % here spins in a synchronisation, so making "
            "Python faster gains nothing",
        )


def _launch_bound(facts: Facts, role: RoleFacts, limits: Thresholds) -> Iterator[Finding]:
    """The GPU has room and waits for what this stage has yet to launch."""
    util, share = _free_gpu_pct(facts, role, limits), role.leaf_share("cuda.launch")
    if util is None:
        return
    advice = "CUDA graphs or compile, larger micro-batches, fewer small operations"
    traced = [stage.cuda for stage in role.stages if stage.cuda is not None]
    numbers: dict[str, float | int | str] = {"gpu_util_pct": util, "launch_share": share}
    if traced:
        idle = role.gpu_idle_share("launch")
        numbers = {"gpu_idle_for_launches_share": idle, **numbers}
        numbers |= {"kernels_per_s": sum(stage.kernels_per_s for stage in traced)}
        numbers |= {"mean_kernel_us": fmean(stage.mean_kernel_us for stage in traced)}
        if idle >= limits.moderate:
            yield Finding("b", "launch-bound", _level(idle, limits), numbers, advice)
    elif share >= limits.launch_moderate:
        yield Finding("b", "launch-bound", "high" if share >= limits.launch else "moderate", numbers, advice)
    elif role.computing_share >= limits.headroom and not role.leaf_share("cuda.") and role.gil_share < limits.gil_own:
        numbers = {"gpu_util_pct": util, "computing_share": role.computing_share}
        told = "profile with --cuda to see what it launches; " + advice
        yield Finding("b", "launch- or GIL-bound: the GPU waits for this thread", "high", numbers, told)


def _sync_bound(facts: Facts, role: RoleFacts, limits: Thresholds) -> Iterator[Finding]:
    util, share = _free_gpu_pct(facts, role, limits), role.leaf_share("cuda.sync")
    if util is not None and share >= limits.sync:
        yield Finding(
            "c",
            "sync-bound",
            "high",
            {"sync_share": share, "gpu_util_pct": util},
            "take .item(), .cpu() and synchronize() out of the loop",
            detail=tuple(frame for stage in role.stages for frame, _ in stage.top_frames[:2]),
        )


def _free_gpu_pct(facts: Facts, role: RoleFacts, limits: Thresholds) -> float | None:
    """How busy the GPUs of ``role`` are, where they have room; None where they have none, or there are none."""
    util = facts.gpu_util_pct(role)
    return util if util is not None and util < limits.gpu_free_pct else None


def _alloc_bound(facts: Facts, role: RoleFacts, limits: Thresholds) -> Iterator[Finding]:
    share = role.leaf_share("cuda.alloc")
    system, faults = _most_system(role)
    by_faults = system >= 0.25 and faults >= 1000 and role.on_cpu_share >= limits.high
    if share >= limits.alloc or by_faults:
        yield Finding(
            "d",
            "allocator-bound",
            "high" if share >= limits.high or by_faults else "moderate",
            {"alloc_share": share, "system_share": system, "minor_faults_per_s": faults},
            "preallocate, keep freed memory (expandable segments, a malloc that does not trim), no empty_cache()",
        )


def _most_system(role: RoleFacts) -> tuple[float, float]:
    return (
        max((stage.system_share for stage in role.stages), default=0.0),
        sum(stage.minor_faults_per_s for stage in role.stages),
    )


def _gil_bound(facts: Facts, role: RoleFacts, limits: Thresholds) -> Iterator[Finding]:
    waiting = role.leaf_share("wait.gil")
    if facts.gil_share is not None:
        yield from gil_held(facts, "", limits, 1.0 if waiting >= limits.high else role.gil_share)
        return
    switches = max((stage.voluntary_per_s for stage in role.stages), default=0.0)
    if switches >= limits.gil_switches_per_s and role.blocked_share >= limits.high and role.flow.busy_share >= 0.5:
        yield Finding(
            "e",
            "probably GIL-bound",
            "moderate",
            {"voluntary_switches_per_s": switches, "blocked_share": role.blocked_share},
            "blocked with work at hand, waking up all the time: most likely it waits for the GIL; stacks would tell",
        )


def gil_held(facts: Facts, code: str, limits: Thresholds, own_share: float = 0.0) -> Iterator[Finding]:
    """The GIL is held most of the time by all threads, or by the stage that limits (``own_share``)."""
    if not facts.stages or facts.gil_share is None or (facts.gil_share < limits.gil and own_share < limits.gil_own):
        return
    holders = sorted(facts.stages, key=lambda stage: -(stage.gil_share or 0.0))[:3]
    yield Finding(
        f"{code}e",
        "GIL-bound",
        "high",
        {"gil_share": facts.gil_share, **{f"{h.name}_gil_share": h.gil_share or 0.0 for h in holders}},
        f"move Python work out of {holders[0].name}: vectorise it, or do it in a process; "
        "more threads gain nothing while one holds the GIL",
        detail=tuple(frame for frame, _ in holders[0].top_frames[:3]),
    )


def _cpu_starved(facts: Facts, role: RoleFacts, limits: Thresholds) -> Iterator[Finding]:
    share = role.run_queue_share or 0.0
    throttled = facts.host.throttled_share if facts.host is not None else 0.0
    if share >= limits.moderate or throttled >= limits.moderate:
        numbers: dict[str, float | int | str] = {"run_queue_share": share, "on_cpu_share": role.on_cpu_share}
        if facts.host is not None:
            numbers |= {
                "host_busy_share": facts.host.busy_share,
                "cores": facts.host.num_cores,
                "load": facts.host.load,
            }
        if throttled:
            numbers["quota_throttled_share"] = throttled
        yield Finding(
            "f",
            "CPU-starved",
            _level(max(share, throttled), limits),
            numbers,
            "fewer threads (OMP_NUM_THREADS, readers), more cores, or a higher quota; no change of queues will help",
        )


def _computing(facts: Facts, role: RoleFacts, limits: Thresholds) -> Iterator[Finding]:
    wanted = role.on_cpu_share + (role.run_queue_share or 0.0)
    if wanted >= limits.headroom and facts.gpu_util_pct(role) is None:
        yield Finding(
            "g",
            "computing on the CPU",
            "high",
            {
                "on_cpu_share": role.on_cpu_share,
                "cores": role.cores,
                **({} if facts.gil_share is None else {"gil_share": role.gil_share}),
            },
            "less arithmetic per item, more threads for it, or a GPU",
            detail=tuple(frame for stage in role.stages for frame, _ in stage.top_frames[:2]),
        )


def _waiting(facts: Facts, role: RoleFacts, limits: Thresholds) -> Iterator[Finding]:
    """Busy for the pipeline, asleep for the kernel: it waits for something that the pipeline does not see."""
    outside = role.leaf_share("wait.queue", "wait.lock", "wait.sleep", "io")
    idle = max(role.on_cpu_share, role.computing_share) + (role.run_queue_share or 0.0) < 1 - limits.headroom
    if outside >= 0.5 or (facts.ticks == 0 and idle):
        yield Finding(
            "h",
            "waiting outside the pipeline",
            "high",
            {"outside_wait_share": outside, "blocked_share": role.blocked_share},
            "find out what it waits for (disk, network, a lock, a sleep) and do that ahead, or in more threads",
            detail=tuple(frame for stage in role.stages for frame, _ in stage.waiting_frames[:2]),
        )
