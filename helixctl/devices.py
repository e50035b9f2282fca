"""What the loops of a process run on: devices, from the recipe or shared out, CPU threads, precision. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from helixctl.errors import Problem
from helixctl.machine import Machine
from helixctl.recipe.schema import LoopOptions, PipelineOptions, StepOptions, TargetOptions, TargetSpan

_DEVICE = re.compile(r"^(cpu|cuda:\d+)$")

_FEW_CPUS = 4

DtypeName = Literal["bfloat16", "float16", "float32"]
Spans = tuple[tuple[str, ...], ...]
"""Devices of each target loop, in the order of the layers."""
Layout = tuple[Spans, tuple[str, ...]]
"""Devices of the target loops, and of the drafters."""


def make_devices(
    pipeline: PipelineOptions, machine: Machine, *, stored: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Where the features of each target come out, and the devices of the drafters; see ``make_spans``."""
    spans, drafters = make_spans(pipeline, machine, stored=stored)
    return homes(spans), drafters


def homes(spans: Spans) -> tuple[str, ...]:
    """Where the features of each target come out: the last device of its span."""
    return tuple(span[-1] for span in spans)


def make_spans(pipeline: PipelineOptions, machine: Machine, *, stored: bool = False) -> Layout:
    """Devices of the targets, all of each, and of the drafters of this process.

    `auto`: the CPU without GPUs; one GPU does both; of several, three quarters are targets. With one side given, the
    other gets the GPUs that are left, or shares. Where features are ``stored``, every GPU trains, and the loops that
    read for it take the targets' place. In a recipe `cuda:0` is the first GPU of each process; what is
    returned has its number on the host.
    """
    gpus = machine.own_gpus
    host_names = {f"cuda:{i}": gpu for i, gpu in enumerate(gpus)}
    targets = _on_host(pipeline.targets, host_names)
    drafters = None if (given := _on_host(pipeline.drafters, host_names)) is None else homes(given)
    if targets is not None and drafters is not None:
        return targets, drafters
    if stored:
        drafters = drafters or gpus or ("cpu",)
        return targets or _alone(drafters), drafters
    if targets is not None:
        taken = {device for span in targets for device in span}
        return targets, tuple(gpu for gpu in gpus if gpu not in taken) or homes(targets)[-1:]
    if drafters is not None:
        return _alone(tuple(gpu for gpu in gpus if gpu not in drafters) or drafters[:1]), drafters
    if len(gpus) < 2:
        return _alone(gpus or ("cpu",)), gpus or ("cpu",)
    num_targets = len(gpus) * 3 // 4
    return _alone(gpus[:num_targets]), gpus[num_targets:]


def _alone(devices: tuple[str, ...]) -> Spans:
    return tuple((device,) for device in devices)


def _on_host(entries: str | tuple[str | TargetSpan, ...], names: dict[str, str]) -> Spans | None:
    """Devices by their number on the host; None for `auto`."""
    if isinstance(entries, str):
        return None
    return tuple(tuple(names.get(device, device) for device in _devices_of(entry)) for entry in entries)


def _devices_of(entry: str | TargetSpan) -> tuple[str, ...]:
    return entry.devices if isinstance(entry, TargetSpan) else (entry,)


def check_devices(pipeline: PipelineOptions, machine: Machine) -> Iterator[Problem]:
    """Devices of a recipe that this machine or this process does not have, or that contradict each other."""
    known = ("cpu", *(f"cuda:{i}" for i in range(len(machine.own_gpus))))
    if len(machine.gpus) % machine.world.local_size:
        message = f"{len(machine.gpus)} GPUs cannot be shared out evenly to {machine.world.local_size} processes"
        yield Problem("pipeline.targets", message, fix="choose another --nproc-per-node, or set CUDA_VISIBLE_DEVICES")
    for name, devices in (("targets", pipeline.targets), ("drafters", pipeline.drafters)):
        if not devices:
            yield Problem(f"pipeline.{name}", "is empty", fix="name devices, or write auto")
        entries = () if isinstance(devices, str) else devices
        for device in (device for entry in entries for device in _devices_of(entry)):
            if not _DEVICE.match(device):
                yield Problem(f"pipeline.{name}", f"{device!r} is no device", fix="write cpu, or cuda:0, cuda:1, ...")
            elif device not in known:
                fix = f"use {', '.join(known)}, or auto"
                owner = "this machine" if machine.world.local_size == 1 else "each process"
                yield Problem(f"pipeline.{name}", f"{owner} has no {device}", fix=fix)
    given = () if isinstance(pipeline.targets, str) else tuple(_devices_of(entry) for entry in pipeline.targets)
    if len(set(given)) > len(set(homes(given))):
        message = "two targets end on one device and begin on others"
        yield Problem("pipeline.targets", message, fix="give loops that share their last device the same devices")


def stage_threads(pipeline: LoopOptions, machine: Machine, num_stages: int) -> int:
    """CPU threads of each of the ``num_stages`` compute stages of a process, which has its share of the host's cores.

    With few cores every stage uses all of them: waiting threads sleep, so the kernel interleaves the stages.
    """
    if pipeline.threads != "auto":
        return pipeline.threads
    cores = machine.own_cpus
    return cores if cores <= _FEW_CPUS else max(1, cores // num_stages)


def target_dtype(target: TargetOptions, stored: str, devices: tuple[str, ...], machine: Machine) -> DtypeName:
    """The precision of a frozen target whose weights are ``stored`` in that one."""
    if target.dtype != "auto":
        return target.dtype
    kept: DtypeName = "float32" if stored == "float32" else "float16" if stored == "float16" else "bfloat16"
    if "cpu" in devices and kept != "float32":
        return "bfloat16" if machine.has_bf16_cpu else "float32"
    return kept


def compute_dtype(train: StepOptions, devices: tuple[str, ...], machine: Machine) -> DtypeName:
    """The precision of matrix products in training."""
    if train.compute_dtype != "auto":
        return train.compute_dtype
    return "float32" if "cpu" in devices and not machine.has_bf16_cpu else "bfloat16"
