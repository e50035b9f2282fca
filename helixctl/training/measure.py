"""``helixctl plan --measure``: times a target and a drafter alone on their devices, with the stages' own code.

What follows from the times is arithmetic (``placement.py``). Nothing is written, and no weights outlive the call.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from helixctl.data.batch import MicroBatch
from helixctl.data.sequence import Sequence as Order
from helixctl.data.store import Store
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.streams import StreamContext
from helixctl.engine.supervisor import Progress
from helixctl.errors import RecipeError, UsageError
from helixctl.machine import Machine
from helixctl.plan import Plan, make_plan
from helixctl.training.build import Targets, build_pipeline, feature_loader, make_loader
from helixctl.training.compiling import compiler
from helixctl.training.placement import Pace, Placement, check_fit, expected, placements, recommend
from helixctl.training.process import set_up_process
from helixctl.training.stages import fill_slot
from helixctl.training.state import TrainState
from helixctl.training.warmup import made_up_batch
from helixctl.training.wiring import Control

WARM_UP = 2
"""Micro-batches before the clock starts."""
ENOUGH_S = 3.0
"""Seconds that a measurement lasts, unless that is fewer than ``FEWEST`` micro-batches or more than ``MOST``."""
FEWEST, MOST = 3, 50
_DISTINCT = 4
"""Micro-batches that take turns."""


@dataclass(frozen=True)
class Measured:
    """What was measured, and what it says about the devices."""

    pace: Pace
    batches: str
    """What the micro-batches were: the first of the store, or made-up full ones."""
    current: Placement
    """The plan's own."""
    placements: tuple[Placement, ...]
    """All that were looked at, fastest first."""
    recommended: Placement | None
    """None where nothing fits into the devices' memory."""


def measure(plan: Plan, machine: Machine) -> Measured:
    """Time micro-batches on the plan's first target device and first drafter device, and compare placements.

    Raises:
        UsageError: several processes were started.
        DataError, ModelError: see ``train``.
    """
    if plan.world.size > 1:
        raise UsageError("plan --measure is one process", fix="run it without torchrun: it looks at every GPU")
    set_up_process(plan)
    alone = _one_each(plan)
    batches, what = _batches(alone)
    with compiler(alone) as log:
        target_s, drafter_s = _time_stages(alone, batches, Control(InterruptFlag(), Progress(), compiled=log))
    pace = Pace(target_s, drafter_s, sum(batch.num_tokens for batch in batches) / len(batches))
    found = compare(plan, machine, pace)
    current = expected(pace, plan.target_devices, plan.drafter_devices)
    return Measured(pace, what, current, tuple(found), recommend(found))


def compare(plan: Plan, machine: Machine, pace: Pace) -> list[Placement]:
    """Every way to use the machine's GPUs (or its CPU), fastest first; what no device can hold is marked."""
    devices = tuple(f"cuda:{i}" for i in range(len(machine.own_gpus))) or ("cpu",)
    return check_fit(list(placements(pace, devices)), partial(_fits, plan, machine))


def _fits(plan: Plan, machine: Machine, placement: Placement) -> bool:
    pipeline = {"targets": placement.targets, "drafters": placement.drafters}
    options = plan.recipe.pipeline.model_copy(update=pipeline)
    try:
        return not make_plan(plan.recipe.model_copy(update={"pipeline": options}), machine).lacks
    except RecipeError:  # a step that is longer than the data with so many drafters
        return False


def _one_each(plan: Plan) -> Plan:
    """The plan with one target and one drafter, and without a cache that would hide the target."""
    target = plan.recipe.target.model_copy(update={"feature_cache_mib": 0})
    return replace(
        plan,
        recipe=plan.recipe.model_copy(update={"target": target}),
        target_devices=plan.target_devices[:1],
        drafter_devices=plan.drafter_devices[:1],
        total_steps=plan.total_steps or 1,
    )


def _batches(plan: Plan) -> tuple[list[MicroBatch], str]:
    """The first micro-batches of the store; without one, full ones."""
    path = plan.recipe.data.store
    if not path.exists():
        return [made_up_batch(plan)], "made up, full"
    loader = make_loader(plan, Store.open(path), Order(1, _DISTINCT))
    return [loader.batch(seq) for seq in range(_DISTINCT)], "the first of the store"


def _time_stages(plan: Plan, batches: Sequence[MicroBatch], control: Control) -> tuple[float, float]:
    """Seconds per micro-batch of the target, and of the drafter with its share of a step."""
    path = plan.recipe.data.store
    store = Store.open(path) if path.exists() else None
    targets = Targets(plan)
    pipeline = build_pipeline(plan, None, TrainState(), None, control, targets)
    drafter, slots = pipeline.drafters[0], pipeline.wires.own_slots[0]
    drafter.setup()
    account = partial(control.compiled.account, "target-0")
    source = feature_loader(plan, store, targets, plan.target_devices[0], account)()
    turns = itertools.cycle(batches)
    with StreamContext(source.device) as stream:
        target_s = _seconds_each(lambda: source.features(next(turns)), source.device)
        for slot, batch in zip(slots, itertools.cycle(batches), strict=False):
            features = stream.handoff(source.features(batch)).take()
            fill_slot(slot, batch, features)
            _wait(source.device)
            _wait(drafter.device)
    accumulated = list(itertools.islice(itertools.cycle(slots), plan.recipe.train.grad_accum_steps))
    with StreamContext(drafter.device):
        step_s = _seconds_each(lambda: drafter.rehearse(accumulated), drafter.device)
    return 0.0 if plan.recipe.target.features is not None else target_s, step_s / len(accumulated)


def _seconds_each(work: Callable[[], object], device: torch.device) -> float:
    """Mean seconds of ``work``, queued as a stage queues it, the device's last one included."""
    for _ in range(WARM_UP):
        work()
    _wait(device)
    began_at, count = time.perf_counter(), 0
    while count < FEWEST or (count < MOST and time.perf_counter() - began_at < ENOUGH_S):
        work()
        count += 1
    _wait(device)
    return (time.perf_counter() - began_at) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
