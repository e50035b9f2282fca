"""What a trace of kernels and CUDA calls says: how long each GPU was idle, and which stage let it wait, and how.

Reads Chrome's trace format as torch.profiler writes it. An idle stretch of a GPU ends with a kernel or a copy; what
that one waited for gives the stretch its kind:

* *launch*: its stage was at work, but had not launched it yet when the GPU fell idle: the GPU waits for the host;
* *work*: its stage was between two micro-batches, so it waited for something else in the pipeline;
* *device*: it had been launched before, and waited for another stream or an event.

A stage is at work inside its named ranges (``engine.streams``), on its own thread; what its native threads launch (the
backward) counts to it too. Imports no torch.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Event = Mapping[str, Any]
Idle = Literal["launch", "work", "device"]

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
_RANGE = "user_annotation"
_TIMED = _ON_DEVICE | _CALLS | {_RANGE}
_US = 1e-6
_KINDS = (
    ("launch", re.compile(r"^cu(da)?(Graph)?Launch")),
    ("sync", re.compile(r"^cu\w*Synchronize")),
    ("alloc", re.compile(r"^(cuda(Host)?(Malloc|Free|Alloc|Register)|cuMem(Alloc|Free|Create|Map|Unmap|SetAccess))")),
    ("copy", re.compile(r"^(cudaMemcpy|cuMemcpy)")),
)


@dataclass(frozen=True)
class DeviceUse:
    """One GPU during the trace; shares are of its time."""

    device: int
    """As the process numbers it."""
    busy_share: float
    """A kernel or a copy was running."""
    idle_shares: dict[str, float]
    """By kind: launch, work, device. With ``busy_share`` they add up to 1, but for the edges of the trace."""
    num_kernels: int


@dataclass(frozen=True)
class StageCuda:
    """One stage during the trace; shares are of its time."""

    call_shares: dict[str, float] = field(default_factory=dict)
    """Time inside CUDA calls of its own thread: launch, sync, alloc, copy, other."""
    launches_per_s: float = 0.0
    kernels_per_s: float = 0.0
    mean_kernel_us: float = 0.0
    devices: tuple[int, ...] = ()
    """GPUs that it had run something."""
    idle_shares: dict[str, float] = field(default_factory=dict)
    """Of its devices' time: idle until something that this stage launched, by kind."""


@dataclass(frozen=True)
class CudaUse:
    """Everything that a trace says."""

    seconds: float
    devices: tuple[DeviceUse, ...]
    stages: dict[str, StageCuda]

    def busy_share(self, stages: Iterable[str]) -> float | None:
        """Mean over the devices that ``stages`` used; None where they used none."""
        used = {device for name in stages for device in self.stages.get(name, StageCuda()).devices}
        shares = [device.busy_share for device in self.devices if device.device in used]
        return sum(shares) / len(shares) if shares else None


@dataclass(frozen=True)
class _Call:
    start: float
    end: float
    thread: int


@dataclass(frozen=True)
class _Task:
    """Something that ran on a GPU."""

    start: float
    end: float
    is_kernel: bool
    call: _Call | None
    """What launched it."""


Owner = Callable[[int], str]
"""The stage that an OS thread works for."""


def read_trace(events: Sequence[Event], owner: Owner, last_s: float = float("inf")) -> CudaUse | None:
    """Add the last ``last_s`` seconds of a trace up; None where nothing ran on a GPU. Events are in microseconds."""
    timed = [event for event in events if event.get("cat") in _TIMED]
    first = max((event["ts"] + event["dur"] for event in timed), default=0.0) - last_s / _US
    calls: dict[int, _Call] = {}
    on_thread: dict[int, list[tuple[_Call, str]]] = defaultdict(list)
    on_device: list[Event] = []
    ranges: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in timed:
        category = event["cat"]
        if category != _RANGE and event["ts"] < first:
            continue
        if category in _CALLS:
            call = _Call(event["ts"], event["ts"] + event["dur"], int(event["tid"]))
            on_thread[call.thread].append((call, event["name"]))
            calls.setdefault(event["args"].get("correlation", -1), call)
        elif category in _ON_DEVICE:
            on_device.append(event)
        else:
            name = str(event["name"])
            ranges[name.partition(" ")[0]].append((event["ts"], event["ts"] + event["dur"]))
    tasks: dict[int, list[_Task]] = defaultdict(list)
    for event in on_device:
        start, args = event["ts"], event["args"]
        call_or_none = calls.get(args.get("correlation", -1))
        task = _Task(start, start + event["dur"], event["cat"] == "kernel", call_or_none)
        tasks[int(args.get("device", 0))].append(task)
    if not tasks:
        return None
    window = _window(tasks, on_thread)
    at_work = {stage: _Ranges(spans) for stage, spans in ranges.items()}
    found = {device: _Device(sorted(own, key=lambda t: t.start), owner, at_work) for device, own in tasks.items()}
    return CudaUse(
        seconds=(window[1] - window[0]) * _US,
        devices=tuple(found[device].use(device, window) for device in sorted(found)),
        stages=_stages(found, on_thread, owner, window),
    )


def call_kind(name: str) -> str:
    """launch, sync, alloc, copy or other, by the name of a CUDA function."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def _window(
    tasks: Mapping[int, Sequence[_Task]], on_thread: Mapping[int, Sequence[tuple[_Call, str]]]
) -> tuple[float, float]:
    spans = [(t.start, t.end) for own in tasks.values() for t in own]
    spans += [(call.start, call.end) for own in on_thread.values() for call, _ in own]
    return min(start for start, _ in spans), max(end for _, end in spans)


class _Ranges:
    """When a stage was at work."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self._spans = sorted(spans)
        self._starts = [start for start, _ in self._spans]

    def holds(self, instant: float) -> bool:
        place = bisect_right(self._starts, instant) - 1
        return place >= 0 and instant < self._spans[place][1]


class _Device:
    """The tasks of one GPU in the order of their start, and its idle stretches."""

    def __init__(self, tasks: Sequence[_Task], owner: Owner, at_work: Mapping[str, _Ranges]) -> None:
        self.tasks = tasks
        self._owner = owner
        self._at_work = at_work
        self.busy_us = 0.0
        self.idle_us: dict[tuple[str, Idle], float] = defaultdict(float)
        """By stage and kind."""
        end = tasks[0].start
        for task in tasks:
            if task.start > end:
                self.idle_us[self._reason(task, end)] += task.start - end
            self.busy_us += max(task.end - max(task.start, end), 0.0)
            end = max(end, task.end)

    def _reason(self, task: _Task, idle_from: float) -> tuple[str, Idle]:
        if task.call is None:
            return "", "device"
        stage = self._owner(task.call.thread)
        if task.call.end <= idle_from:
            return stage, "device"
        ranges = self._at_work.get(stage)
        return stage, "launch" if ranges is None or ranges.holds(idle_from) else "work"

    def stages(self) -> Iterator[tuple[str, _Task]]:
        for task in self.tasks:
            if task.call is not None:
                yield self._owner(task.call.thread), task

    def use(self, device: int, window: tuple[float, float]) -> DeviceUse:
        length = window[1] - window[0]
        idle: dict[str, float] = dict.fromkeys(("launch", "work", "device"), 0.0)
        for (_, kind), microseconds in self.idle_us.items():
            idle[kind] += microseconds / length
        return DeviceUse(device, self.busy_us / length, idle, sum(task.is_kernel for task in self.tasks))


def _stages(
    devices: Mapping[int, _Device],
    on_thread: Mapping[int, Sequence[tuple[_Call, str]]],
    owner: Owner,
    window: tuple[float, float],
) -> dict[str, StageCuda]:
    length, kernels, used = window[1] - window[0], defaultdict(list), defaultdict(set)
    idle: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for device, own in devices.items():
        for stage, task in own.stages():
            used[stage].add(device)
            if task.is_kernel:
                kernels[stage].append(task.end - task.start)
        for (stage, kind), microseconds in own.idle_us.items():
            idle[stage][kind] += microseconds
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    launches: dict[str, int] = defaultdict(int)
    for thread, named in on_thread.items():
        stage = owner(thread)
        for call, name in _outermost(named):
            spent[stage][call_kind(name)] += (call.end - call.start) / length
            launches[stage] += call_kind(name) == "launch"
    names = {*kernels, *used, *spent} - {""}
    return {
        name: StageCuda(
            call_shares=dict(spent[name]),
            launches_per_s=launches[name] / length / _US,
            kernels_per_s=len(kernels[name]) / length / _US,
            mean_kernel_us=sum(kernels[name]) / len(kernels[name]) if kernels[name] else 0.0,
            devices=tuple(sorted(used[name])),
            idle_shares={kind: us / length / max(len(used[name]), 1) for kind, us in idle[name].items()},
        )
        for name in sorted(names)
    }


def _outermost(named: Sequence[tuple[_Call, str]]) -> Iterator[tuple[_Call, str]]:
    """Calls of one thread that no other call of it encloses: the runtime calls the driver."""
    end = float("-inf")
    for call, name in sorted(named, key=lambda item: (item[0].start, -item[0].end)):
        if call.end > end:
            yield call, name
            end = call.end
