"""What a recording says, in the few numbers that verdicts rest on. Judges nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from helixctl.profiling import leaves, pipeline, threads
from helixctl.profiling.cuda import CudaUse, StageCuda, read_trace
from helixctl.profiling.gpu import GpuSample, throttle_reasons
from helixctl.profiling.host import HostUse, host_between
from helixctl.profiling.owners import ROLES, Crew, in_order, role_of
from helixctl.profiling.pipeline import PipelineUse, StageFlow
from helixctl.profiling.pyspy import Frames
from helixctl.profiling.recording import Recording, cores_used
from helixctl.profiling.slowdown import Slowdown, find_slowdown
from helixctl.profiling.stalls import Stalls, find_stalls
from helixctl.profiling.threads import ThreadUse


@dataclass(frozen=True)
class StageFacts:
    """One stage: the thread that runs it, and the native threads that work for it. Shares are of the wall clock."""

    name: str
    role: str
    num_threads: int
    cores: float
    """Core time of all its threads over the wall clock."""
    system_share: float
    """Of ``cores``, in the kernel."""
    on_cpu_share: float
    """Of its own thread, as everything below."""
    run_queue_share: float | None
    blocked_share: float
    voluntary_per_s: float
    minor_faults_per_s: float
    gil_share: float | None
    """Time that it held the GIL; None without stacks."""
    leaf_shares: dict[str, float]
    """Of stacks; those of CUDA calls are measured where there is a trace."""
    top_frames: tuple[tuple[str, float], ...]
    waiting_frames: tuple[tuple[str, float], ...]
    device: str | None = None
    """``cpu`` or ``cuda:N``; None where the run does not say."""
    cuda: StageCuda | None = None
    """None without a trace, or where it launched nothing."""

    def without_stacks(self) -> StageFacts:
        """The same but for what stacks tell; the places where they were seen stay."""
        kept = {name: share for name, share in self.leaf_shares.items() if self.cuda and name.startswith("cuda.")}
        return replace(self, leaf_shares=kept, gil_share=None)

    def with_measured_calls(self) -> StageFacts:
        """The shares of CUDA calls as the trace measured them, where there is one."""
        if self.cuda is None:
            return self
        kinds = {f"cuda.{kind}": share for kind, share in self.cuda.call_shares.items() if kind != "other"}
        others = {name: share for name, share in self.leaf_shares.items() if not name.startswith("cuda.")}
        return replace(self, leaf_shares={**others, **kinds})


@dataclass(frozen=True)
class RoleFacts:
    """All stages of one kind: means over their own threads, sums of cores and of the GIL."""

    role: str
    flow: StageFlow
    stages: tuple[StageFacts, ...]

    @property
    def cores(self) -> float:
        """Cores that the stages and their native threads use."""
        return sum(stage.cores for stage in self.stages)

    @property
    def on_cpu_share(self) -> float:
        """Mean over stages."""
        return _mean(stage.on_cpu_share for stage in self.stages)

    @property
    def computing_share(self) -> float:
        """Mean over stages of the cores used by the stage's thread and those that work for it, 1 at most each.

        The backward of a GPU runs in a thread of its own, while the drafter's waits for it.
        """
        return _mean(min(stage.cores, 1.0) for stage in self.stages)

    @property
    def run_queue_share(self) -> float | None:
        """Mean over stages; None where the kernel does not count it."""
        found = [stage.run_queue_share for stage in self.stages if stage.run_queue_share is not None]
        return fmean(found) if found else None

    @property
    def blocked_share(self) -> float:
        """Mean over stages."""
        return _mean(stage.blocked_share for stage in self.stages)

    @property
    def gil_share(self) -> float:
        """Sum over stages."""
        return sum(stage.gil_share or 0.0 for stage in self.stages)

    def gpu_idle_share(self, kind: str) -> float:
        """Time that its GPUs were idle until something that it launched, by kind (``cuda.py``); mean over stages."""
        return _mean(stage.cuda.idle_shares.get(kind, 0.0) for stage in self.stages if stage.cuda is not None)

    def leaf_share(self, *prefixes: str) -> float:
        """Mean share of the leaf classes that begin so."""
        return _mean(
            sum(share for name, share in stage.leaf_shares.items() if name.startswith(prefixes))
            for stage in self.stages
        )


@dataclass(frozen=True)
class GpuFacts:
    """One GPU over the window: means of what it told; ``throttled_share`` is of the looks."""

    uuid: str
    name: str
    means: dict[str, float]
    throttled_share: float
    throttles: tuple[str, ...]
    missing: dict[str, str]


@dataclass(frozen=True)
class Facts:
    """Everything that the rules look at."""

    seconds: float
    ticks: int
    """Looks at the stacks; 0 without them."""
    error_share: float
    stacks_problem: str | None
    crew: Crew
    stages: tuple[StageFacts, ...]
    """Stages, the main thread, and every other thread that took a core now and then; along the pipeline."""
    threads: tuple[tuple[str, ThreadUse], ...]
    """Owner and use of every thread."""
    pipeline: PipelineUse | None
    roles: tuple[RoleFacts, ...]
    gil_share: float | None
    """Time that anybody held the GIL."""
    stalls: Stalls | None
    gpus: tuple[GpuFacts, ...]
    host: HostUse | None
    slowdown: Slowdown | None
    """Against the stretch without a profiler, in the same run."""
    profiler_cores: float
    vanished: tuple[str, ...]
    """Stages whose thread has gone although the run goes on."""
    failure: str | None
    """What the run said when it failed."""
    warmed_up: bool
    cuda: CudaUse | None = None
    cuda_problem: str | None = None
    """Why a trace that was asked for is not there."""
    cuda_slowdown_share: float = 0.0
    """Loss of speed while the trace was made; negative where the run was faster."""
    gpu_uuids: Mapping[str, str] = field(default_factory=dict)
    """UUID of ``cuda:N``, where the run says it."""

    def gpu_util_pct(self, role: RoleFacts | None = None) -> float | None:
        """How busy GPUs were: those of ``role`` where it is known which these are, else all; None without GPUs."""
        stages = role.stages if role is not None else ()
        traced = self.cuda.busy_share(stage.name for stage in stages) if self.cuda is not None else None
        if traced is not None:
            return 100 * traced
        devices = {stage.device for stage in stages}
        if devices == {"cpu"} or (role is not None and role.role == "reader"):
            return None
        uuids = {self.gpu_uuids[device] for device in devices if device is not None and device in self.gpu_uuids}
        found = [g.means["util_pct"] for g in self.gpus if "util_pct" in g.means and (not uuids or g.uuid in uuids)]
        return fmean(found) if found else None


def find_facts(seen: Recording) -> Facts:
    """Add a recording up."""
    crew = pipeline.crew_of(seen.last_status)
    uses = threads.use_between(seen.threads[0], seen.threads[-1]) if len(seen.threads) > 1 else ()
    owned = tuple((crew.owner(use.thread_id, use.name, seen.pid), use) for use in uses)
    cuda = _trace(seen, crew)
    stages = _stages(owned, seen, crew, cuda)
    window = seen.window_statuses
    use = pipeline.use_between(window[0], window[-1]) if len(window) > 1 else None
    status = seen.last_status
    uuids: dict[str, str] = status["counters"].get("gpus", {}) if status is not None else {}
    return Facts(
        seconds=seen.seconds,
        ticks=seen.stacks.ticks,
        error_share=seen.stacks.errors / seen.stacks.ticks if seen.stacks.ticks else 0.0,
        stacks_problem=seen.stacks.problem,
        crew=crew,
        stages=stages,
        threads=owned,
        pipeline=use,
        roles=_roles(use, stages, crew) if use is not None else (),
        gil_share=_gil_share(seen, seen.gil.num_samples),
        stalls=find_stalls(window, role_groups(crew)) if use is not None else None,
        gpus=_gpus(seen, uuids),
        host=host_between(*seen.host, seen.seconds) if seen.host is not None else None,
        slowdown=find_slowdown(seen),
        profiler_cores=cores_used(seen),
        vanished=_vanished(seen, crew),
        failure=status["error"] if status is not None and status["phase"] == "failed" else None,
        warmed_up=status is None or pipeline.is_open(status),
        cuda=cuda,
        cuda_problem=_trace_problem(seen, cuda),
        cuda_slowdown_share=_trace_slowdown(seen, use),
        gpu_uuids=uuids,
    )


def role_groups(crew: Crew) -> list[tuple[str, tuple[str, ...]]]:
    """The stages of each role, upstream first."""
    grouped = [(role, tuple(name for name in crew.stages if role_of(name) == role)) for role in ROLES]
    return [(role, names) for role, names in grouped if names]


def _trace(seen: Recording, crew: Crew) -> CudaUse | None:
    names = {reading.thread_id: reading.name for sample in seen.threads for reading in sample.readings}
    if (traced := seen.cuda) is None:
        return None
    seconds = traced.ended_at - traced.began_at
    return read_trace(traced.events, lambda tid: crew.owner(tid, names.get(tid, ""), seen.pid), seconds)


def _trace_problem(seen: Recording, cuda: CudaUse | None) -> str | None:
    if seen.cuda is None or cuda is not None:
        return None
    return seen.cuda.problem or "the trace holds nothing that ran on a GPU"


def _trace_slowdown(seen: Recording, use: PipelineUse | None) -> float:
    """Speed while the trace was made against the window; 0 where it cannot be told."""
    traced = seen.cuda
    if traced is None or use is None or not use.tokens_per_s:
        return 0.0
    meanwhile = [status for status in seen.statuses if traced.began_at <= status["at_s"] <= traced.ended_at]
    if len(meanwhile) < 2:
        return 0.0
    return 1 - pipeline.use_between(meanwhile[0], meanwhile[-1]).tokens_per_s / use.tokens_per_s


def _stages(
    owned: Sequence[tuple[str, ThreadUse]], seen: Recording, crew: Crew, cuda: CudaUse | None
) -> tuple[StageFacts, ...]:
    groups: dict[str, list[ThreadUse]] = defaultdict(list)
    for owner, use in owned:
        groups[_group_name(owner, use, seen, crew)].append(use)
    own_thread = {stage: thread_id for thread_id, stage in (crew.by_thread_id or {}).items()}
    devices, traced = crew.devices or {}, cuda.stages if cuda is not None else {}
    return tuple(
        replace(
            _stage(name, groups[name], own_thread.get(name), seen), device=devices.get(name), cuda=traced.get(name)
        ).with_measured_calls()
        for name in in_order(list(groups))
    )


def _group_name(owner: str, use: ThreadUse, seen: Recording, crew: Crew) -> str:
    """Python's own name of a thread that no stage owns: the system knows it as ``python`` only."""
    return owner if owner in crew.stages else seen.stacks.names.get(use.thread_id, owner)


def _stage(name: str, uses: Sequence[ThreadUse], own_thread: int | None, seen: Recording) -> StageFacts:
    own = next((use for use in uses if use.thread_id == own_thread), uses[0])
    cores = sum(use.on_cpu_share for use in uses)
    stacks: Mapping[Frames, int] = seen.stacks.by_thread.get(own.thread_id, Counter())
    native = seen.native.by_thread.get(own.thread_id) if seen.native is not None else None
    held = sum(seen.gil.by_thread.get(use.thread_id, Counter()).total() for use in uses)
    return StageFacts(
        name=name,
        role=role_of(name),
        num_threads=len(uses),
        cores=cores,
        system_share=sum(use.system_share for use in uses) / cores if cores else 0.0,
        on_cpu_share=own.on_cpu_share,
        run_queue_share=own.run_queue_share,
        blocked_share=own.blocked_share,
        voluntary_per_s=own.voluntary_per_s,
        minor_faults_per_s=sum(use.minor_faults_per_s for use in uses),
        gil_share=_gil_share(seen, held),
        leaf_shares=leaves.shares(native or stacks),
        top_frames=tuple(leaves.top_frames(stacks)),
        waiting_frames=tuple(leaves.waiting_frames(stacks)),
    )


def _gil_share(seen: Recording, held: int) -> float | None:
    """Samples with the GIL over the looks that py-spy managed in the time: both passes are late together."""
    if seen.gil.problem is not None or not seen.gil.rate_hz or not seen.stacks.ticks:
        return None
    looks = seen.stacks.ticks * seen.gil.rate_hz / seen.stacks.rate_hz
    return min(held / looks, 1.0)


def _roles(use: PipelineUse, stages: Sequence[StageFacts], crew: Crew) -> tuple[RoleFacts, ...]:
    return tuple(
        RoleFacts(flow.role, flow, tuple(stage for stage in stages if stage.name in flow.stages))
        for flow in pipeline.flows(use, role_groups(crew))
    )


def _gpus(seen: Recording, uuids: Mapping[str, str]) -> tuple[GpuFacts, ...]:
    """Those that the run uses, where it says which; else all that it may use."""
    by_uuid: dict[str, list[GpuSample]] = defaultdict(list)
    for sample in seen.gpus:
        if not uuids or sample.uuid in uuids.values():
            by_uuid[sample.uuid].append(sample)
    return tuple(_gpu(uuid, samples, seen) for uuid, samples in by_uuid.items())


def _gpu(uuid: str, samples: Sequence[GpuSample], seen: Recording) -> GpuFacts:
    names = {name for sample in samples for name in sample.values if name != "throttle_mask"}
    reasons = [throttle_reasons(int(sample.values.get("throttle_mask", 0))) for sample in samples]
    return GpuFacts(
        uuid=uuid,
        name=seen.gpu_names.get(uuid, ""),
        means={name: _mean(s.values[name] for s in samples if name in s.values) for name in sorted(names)},
        throttled_share=_mean(float(bool(found)) for found in reasons),
        throttles=tuple(sorted({reason for found in reasons for reason in found})),
        missing=seen.gpu_missing.get(uuid, {}),
    )


def _vanished(seen: Recording, crew: Crew) -> tuple[str, ...]:
    status = seen.last_status
    if status is None or status["phase"] != "running" or seen.has_ended or not seen.threads:
        return ()
    alive = {reading.thread_id for reading in seen.threads[-1].readings}
    running = {stage["name"] for stage in status["stages"] if stage["state"] == "running"}
    owners = (crew.by_thread_id or {}).items()
    return tuple(stage for thread_id, stage in owners if stage in running and thread_id not in alive)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
