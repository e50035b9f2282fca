"""Times target, drafter and pipeline with random weights in one of the shapes of docs/benchmarks.md.

    python scripts/benchmark_shape.py 8b --batches 20

Every stage runs through the code of training: compiled layers, captured graphs, slots. One JSON line per shape.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from helixctl.data.sequence import Sequence
from helixctl.data.store import Store
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.stats import PipelineStats
from helixctl.engine.supervisor import Progress
from helixctl.machine import read_machine
from helixctl.models.features import FixedFeatures
from helixctl.plan import Plan, make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training.build import Targets, build_drafter, build_pipeline, make_loader, make_slot_for
from helixctl.training.loop import Drafter, autocast
from helixctl.training.optim import StepOutcome, gradients, make_optimizer, take_step
from helixctl.training.passes import TrainPass
from helixctl.training.process import set_up_process
from helixctl.training.stages import fill_slot
from helixctl.training.state import TrainState
from helixctl.training.warmup import captures, compiles
from helixctl.training.wiring import Control
from scripts.benchmark import machine_facts, wait
from scripts.shapes import SHAPES, random_weights, write_recipe

WARM_UP = 3


def main() -> None:
    """Measure every named shape."""
    options = parse_options()
    found = {**machine_facts(), "matrix product 8192^3 bf16, TFLOP/s": matrix_rate()}
    print(json.dumps(found), flush=True)
    for name in options.shapes:
        with tempfile.TemporaryDirectory() as folder, random_weights():
            print(json.dumps({"shape": name, **measure(name, Path(folder), options)}), flush=True)


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--batches", type=int, default=20, help="micro-batches per measurement")
    parser.add_argument("--mean-length", type=int, help="mean length of packed documents; default: one per row")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in helixctl")
    parser.add_argument("--only", choices=("target", "drafter", "pipeline"), help="measure this alone")
    parser.add_argument("--kernels", type=int, default=0, help="also list so many kernels by time")
    return parser.parse_args(words)


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of one shape."""
    steps = options.batches + WARM_UP
    recipe = write_recipe(SHAPES[name], folder, steps, options.mean_length)
    plan = make_plan(load_recipe(recipe, options.set), read_machine())
    set_up_process(plan)
    store = Store.open(plan.recipe.data.store)
    targets = Targets(plan)
    found: dict[str, Any] = {"target's products": str(plan.float8 or plan.target_dtype)}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "target": partial(target_alone, plan, store, targets, options),
        "drafter": partial(drafter_alone, plan, store, targets, options),
        "pipeline": lambda: pipeline(plan, store, targets),
    }
    for part, work in parts.items():
        if options.only in (None, part):
            alone = {"target": plan.target_devices[0], "drafter": plan.drafter_devices[0]}.get(part, "cpu")
            with current(alone):
                own = measured(part, work)
            print(name, own, flush=True)
            found |= own
    predicted = Counter[str]()
    for line in plan.memory:
        predicted[line.device] += line.num_bytes
    found["predicted memory, GiB"] = max(predicted.values()) / 2**30
    if {"target tokens/s", "drafter tokens/s", "pipeline tokens/s"} <= set(found):
        target, drafter = found["target tokens/s"], found["drafter tokens/s"]
        found["in turn tokens/s"] = target * drafter / (target + drafter)
        found["pipeline / in turn"] = found["pipeline tokens/s"] / found["in turn tokens/s"]
        found["pipeline / slower stage"] = found["pipeline tokens/s"] / min(target, drafter)
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


def measured(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``work`` found, and the peak memory of the device that took most."""
    devices = range(torch.cuda.device_count())
    torch.cuda.empty_cache()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    found = {f"{name} {key}": value for key, value in work().items()}
    if devices:
        found[f"{name} peak GiB"] = max(map(torch.cuda.max_memory_allocated, devices)) / 2**30
        found[f"{name} reserved GiB"] = max(map(torch.cuda.max_memory_reserved, devices)) / 2**30
    return found


def current(device: torch.device | str) -> AbstractContextManager[object]:
    """The device that this thread's work goes to."""
    device = torch.device(device)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def target_alone(plan: Plan, store: Store, targets: Targets, options: argparse.Namespace) -> dict[str, Any]:
    """The prepared target's forward over batches made beforehand."""
    loader = make_loader(plan, store, Sequence(1, options.batches + WARM_UP))
    batches = [loader.batch(seq) for seq in range(options.batches + WARM_UP)]
    target = targets.on(plan.target_devices[0])
    began_at = time.perf_counter()
    fixed = target.fixed(batches[0])
    wait()
    seconds = time.perf_counter() - began_at
    source = target if fixed is None else fixed
    if torch.cuda.is_available():
        batches = [batch.pinned() for batch in batches]
    found = {"warm-up s": seconds, "captured": isinstance(fixed, FixedFeatures) and fixed.lends}
    found |= timed(lambda i: source.features(batches[i]), [batch.num_tokens for batch in batches])
    list_kernels(options.kernels, lambda: source.features(batches[0]))
    return found


def drafter_alone(plan: Plan, store: Store, targets: Targets, options: argparse.Namespace) -> dict[str, Any]:
    """Loss, backward and optimizer step on slots that are filled beforehand."""
    loader = make_loader(plan, store, Sequence(1, options.batches + WARM_UP))
    device = torch.device(plan.drafter_devices[0])
    shared = targets.shared_on(plan.drafter_devices[0])
    model = build_drafter(plan, device)
    drafter = cast(Drafter, model)
    optimizer = make_optimizer(model, plan.recipe.train)
    gradients(optimizer)
    slots = [make_slot_for(plan, device) for _ in range(2)]
    for seq, slot in enumerate(slots):
        batch = loader.batch(seq)
        fill_slot(slot, batch, [torch.randn(f.shape, dtype=f.dtype, device=device) for f in slot.features])
    step_of = TrainPass(lambda slot: drafter.loss(slot, shared), lambda: autocast(plan, device), plan.pass_rows)
    began_at = time.perf_counter()
    if compiles(plan, device):
        drafter.compiles = True
        step_of(slots[0])
        if captures(plan) and drafter.capturable:
            step_of.capture(slots, device)
    wait()
    seconds = time.perf_counter() - began_at

    def step(i: int) -> None:
        sums = step_of(slots[i % 2])
        take_step(optimizer, sums["loss_den"].float(), plan.recipe.train.learning_rate, 1.0)

    filled = [loader.batch(seq).num_tokens for seq in range(len(slots))]
    tokens = [filled[i % 2] for i in range(options.batches + WARM_UP)]
    found = {"warm-up s": seconds, "captured": bool(step_of.num_captured), **timed(step, tokens)}
    list_kernels(options.kernels, lambda: step(0))
    return found


class Clock:
    """An observer that only looks at the time."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.times: dict[int, float] = {}
        self.losses: list[Tensor] = []

    def restore(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        """Nothing to restore."""

    def started(self) -> None:
        """Training begins."""
        self.times[0] = time.perf_counter()

    def stepped(self, step: int, sums: dict[str, Tensor], _outcome: StepOutcome) -> None:
        """Waits for the device twice in the run."""
        self.losses.append(sums["loss_num"] / sums["loss_den"])
        if step in (self._first, self._last):
            torch.cuda.current_stream().synchronize() if torch.cuda.is_available() else None
            self.times[step] = time.perf_counter()

    def validated(self, sums: dict[str, Tensor], model: nn.Module, seconds: float) -> None:
        """Not done here."""

    def boundary(self, model: nn.Module, optimizer: torch.optim.AdamW, *, stopping: bool) -> None:
        """Nothing is saved."""


def pipeline(plan: Plan, store: Store, targets: Targets) -> dict[str, Any]:
    """All stages at once, as `helixctl train` builds them."""
    steps = plan.recipe.train.steps or 0
    clock = Clock(WARM_UP, steps)
    began_at = time.perf_counter()
    control = Control(InterruptFlag(), Progress())
    built = build_pipeline(plan, store, TrainState(), clock, control, targets)
    built.supervisor.run()
    tokens = consumed(plan, store, WARM_UP, steps)["tokens"]
    return {
        "start-up s": clock.times[0] - began_at,
        "tokens/s": tokens / (clock.times[steps] - clock.times[WARM_UP]),
        "ms": (clock.times[steps] - clock.times[WARM_UP]) / (steps - WARM_UP) * 1000,
        "waits s": waits(built.stats()),
        "last loss": float(clock.losses[-1]),
    }


def consumed(plan: Plan, store: Store, first: int, last: int) -> dict[str, int]:
    """Real tokens, documents and anchors of the steps from ``first`` to ``last``, of all processes."""
    loader = make_loader(plan, store, Sequence(plan.batches_per_step, last))
    numbers = range(first * plan.batches_per_step, last * plan.batches_per_step)
    counts = {"tokens": 0, "documents": 0, "anchors": 0}
    for batch in map(loader.batch, numbers):
        counts["tokens"] += batch.num_tokens
        counts["documents"] += sum(len(row) for row in batch.documents)
        counts["anchors"] += int(batch.anchor_valid.sum())
    return counts


def waits(stats: PipelineStats) -> dict[str, list[float]]:
    """Seconds that senders and receivers of every channel waited."""
    channels = [link.channel for link in stats.links]
    return {channel.name: [round(channel.send_wait_s, 2), round(channel.receive_wait_s, 2)] for channel in channels}


def timed(work: Callable[[int], object], tokens: list[int]) -> dict[str, float]:
    """Milliseconds and real tokens per second of ``work(i)`` behind the warm-up; and of queueing it alone."""
    for i in range(WARM_UP):
        work(i)
    wait()
    began_at = time.perf_counter()
    for i in range(WARM_UP, len(tokens)):
        work(i)
    queued_at = time.perf_counter()
    wait()
    seconds, count = time.perf_counter() - began_at, len(tokens) - WARM_UP
    return {
        "ms": seconds / count * 1000,
        "queueing ms": (queued_at - began_at) / count * 1000,
        "tokens/s": sum(tokens[WARM_UP:]) / seconds,
    }


def list_kernels(number: int, work: Callable[[], object]) -> None:
    """Print the kernels of one call that take most time."""
    if not number or not torch.cuda.is_available():
        return
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        work()
        wait()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    for event in events[:number]:
        print(f"  {event.self_device_time_total / 1000:9.2f} ms {event.count:5d} x {event.key[:100]}", flush=True)


def matrix_rate() -> float:
    """TFLOP/s of a bf16 product of two 8192 x 8192 matrices; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    wait()
    began_at = time.perf_counter()
    for _ in range(20):
        a @ a
    wait()
    return round(20 * 2 * 8192**3 / (time.perf_counter() - began_at) / 1e12, 1)


if __name__ == "__main__":
    main()
