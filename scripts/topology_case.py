"""One topology in this process (or in those that torchrun started): what ``topologies.py`` starts for every case.

    python -m scripts.topology_case --shape tiny --targets cpu,cpu --drafters cpu --steps 8

The pipeline is built as `helixctl train` builds it, from random weights; one JSON line on standard output by rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from helixctl.data.store import Store
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.supervisor import Progress
from helixctl.errors import StageFailed
from helixctl.machine import read_machine
from helixctl.models.drafters._sizes import make_shape
from helixctl.models.target import Target
from helixctl.plan import Plan, make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training.build import Targets, build_pipeline
from helixctl.training.loop import TrainerStage
from helixctl.training.measure import measure
from helixctl.training.peaks import expected_peaks, measured_peaks
from helixctl.training.process import set_up_process
from helixctl.training.processes import Processes, joined_processes
from helixctl.training.state import TrainState
from helixctl.training.wiring import Control
from scripts.benchmark import wait
from scripts.benchmark_shape import WARM_UP, Clock, consumed, waits
from scripts.shapes import FAULT_AT, SHAPES, random_weights, write_recipe

_GIB = 2**30
PLACES = {"target": (Target, "features"), "drafter": (TrainerStage, "_accumulate")}
"""Methods that do a stage's work; on a GPU the target's is replayed, and its fault is in what hands features on."""


def main(words: list[str] | None = None) -> None:
    """Run the case and print what was found."""
    options = parse_options(words)
    with tempfile.TemporaryDirectory() as folder, random_weights(), contextlib.ExitStack() as stack:
        if options.stage_ms:
            stack.enter_context(lasting(*(ms / 1000 for ms in options.stage_ms)))
        found = run(make_case_plan(Path(folder), options), options)
    if found:
        print(json.dumps(found), flush=True)


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES))
    parser.add_argument("--targets", required=True, help="devices of target loops, as cuda:0,cuda:1")
    parser.add_argument("--drafters", required=True, help="devices of drafter loops")
    parser.add_argument("--steps", type=int, default=8, help=f"to measure, behind {WARM_UP}")
    parser.add_argument("--mean-length", type=int, help="mean length of packed documents; default: one per row")
    parser.add_argument("--alone", action="store_true", help="time both stages alone instead")
    parser.add_argument("--fault", choices=sorted(PLACES), help="let one call of such a stage fail at full load")
    parser.add_argument("--stage-ms", type=float, nargs=2, metavar=("TARGET", "DRAFTER"), help="see topologies")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in helixctl")
    return parser.parse_args(words)


def make_case_plan(folder: Path, options: argparse.Namespace) -> Plan:
    """Data, recipe and plan of the case, in ``folder``."""
    machine = read_machine()
    targets, drafters = options.targets.split(","), options.drafters.split(",")
    steps = options.steps + WARM_UP
    batches = steps * len(drafters) * machine.world.size
    recipe = write_recipe(SHAPES[options.shape], folder, batches, options.mean_length)
    where = [f"pipeline.targets=[{', '.join(targets)}]", f"pipeline.drafters=[{', '.join(drafters)}]"]
    return make_plan(load_recipe(recipe, [*where, f"train.steps={steps}", *options.set]), machine)


def run(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """What the case found; empty in all ranks but the first."""
    if plan.lacks:
        return {"skipped": "; ".join(str(lack) for lack in plan.lacks)}
    if options.alone:
        pace = measure(plan, read_machine()).pace
        return {**vars(pace), "parameters": plan.parameters}
    set_up_process(plan)
    store, targets = Store.open(plan.recipe.data.store), Targets(plan)
    with joined_processes(plan) as processes:
        if options.fault:
            return fault(plan, store, targets, options.fault)
        return pipeline(plan, store, targets, processes)


def pipeline(plan: Plan, store: Store, targets: Targets, processes: Processes) -> dict[str, Any]:
    """Speed, waits, memory and losses of all stages at once, of all processes together."""
    steps = plan.recipe.train.steps or 0
    clock, began_at = Clock(WARM_UP, steps), time.perf_counter()
    control = Control(InterruptFlag(), Progress(), processes)
    first = processes.world.rank == 0
    built = build_pipeline(plan, store, TrainState(), clock if first else None, control, targets)
    built.supervisor.run()
    parts = processes.gather(memory(plan))
    if not first:
        return {}
    seconds = clock.times[steps] - clock.times[WARM_UP]
    counts = consumed(plan, store, WARM_UP, steps)
    flops, rate = products(plan, counts), matrix_rate(plan.devices[0])
    num_devices = len(plan.devices) * plan.world.size if plan.devices != ("cpu",) else 1
    return {
        "tokens/s": counts["tokens"] / seconds,
        "documents/s": counts["documents"] / seconds,
        "step ms": seconds / (steps - WARM_UP) * 1000,
        "MFU": flops / seconds / (rate * num_devices),
        "matrix TFLOP/s": rate / 1e12,
        "waits s": waits(built.stats()),
        "memory GiB, measured and predicted": [line for part in parts for line in part],
        "start-up s": clock.times[0] - began_at,
        "losses": [round(float(loss), 6) for loss in clock.losses],
    }


def memory(plan: Plan) -> list[list[Any]]:
    """Device, most GiB at one time, and what the plan predicts for it."""
    peaks = measured_peaks(plan)
    return [[name, round(peaks[name] / _GIB, 2), round(size / _GIB, 2)] for name, size in expected_peaks(plan).items()]


def products(plan: Plan, counts: dict[str, int]) -> float:
    """Floating-point operations of the matrix products that ``counts`` took.

    Attention scores and what is computed again are left out. The target runs up to its last tap. A drafter's layers see
    its blocks, their keys and values the context too; the projection of the taps needs no gradient of its input, the
    head none of its weights.
    """
    t, s = plan.target, make_shape(plan.recipe.drafter, plan.target)
    width = t.hidden_size
    layer = 2 * width * t.head_dim * (t.num_heads + t.num_kv_heads) + 3 * width * (t.intermediate_size or 4 * width)
    target = 2 * (max(plan.captured_layers) + 1) * layer * counts["tokens"]
    keys = 2 * s.hidden_size * s.head_dim * s.num_kv_heads
    block = 2 * s.hidden_size * s.head_dim * s.num_heads + keys + 3 * s.hidden_size * s.intermediate_size
    slots = counts["anchors"] * plan.recipe.drafter.block_size
    head = 4 * (slots - counts["anchors"]) * t.vocab_size * width
    context = (4 * s.num_taps * s.hidden_size**2 + 6 * s.num_layers * keys) * counts["tokens"]
    return float(target + 6 * s.num_layers * block * slots + context + head)


def matrix_rate(device: str) -> float:
    """FLOP/s of a product of two matrices: 8192^3 in bfloat16 on a GPU, 1024^3 in float32 on the CPU."""
    size, dtype = (1024, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    one = torch.randn(size, size, device=device, dtype=dtype)
    for _ in range(3):
        one @ one
    wait()
    began_at = time.perf_counter()
    for _ in range(20):
        one @ one
    wait()
    return 20 * 2 * size**3 / (time.perf_counter() - began_at)


def fault(plan: Plan, store: Store, targets: Targets, role: str) -> dict[str, Any]:
    """Seconds from a failing call to the end of the run in this thread, and which of its threads are left."""
    before, failed_at = set(threading.enumerate()), [0.0]
    built = build_pipeline(plan, store, TrainState(), None, Control(InterruptFlag(), Progress()), targets)
    told = ""
    with failing(role, FAULT_AT * plan.batches_per_step, failed_at):
        try:
            built.supervisor.run()
        except StageFailed as failed:
            told = str(failed)
    if not told:
        return {"failed": "the run went on"}
    ended_at = time.monotonic()
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    return {
        "told": told,
        "told after s": ended_at - failed_at[0],
        "threads left": left,
        "failed at": failed_at[0],
        "process": os.getpid(),
    }


@contextlib.contextmanager
def failing(role: str, nth: int, failed_at: list[float]) -> Iterator[None]:
    """The ``nth`` call of such a stage raises; the instant goes to ``failed_at``."""
    owner: Any
    owner, name = PLACES[role]
    if role == "target" and torch.cuda.is_available():
        from helixctl.models.features import FixedFeatures

        owner = FixedFeatures
    original, lock, calls = getattr(owner, name), threading.Lock(), 0

    def replaced(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            number = calls
        if number == nth:
            failed_at[0] = time.monotonic()
            raise RuntimeError("made to fail")
        return original(*arguments, **more)

    setattr(owner, name, replaced)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def lasting(target_s: float, drafter_s: float) -> Iterator[None]:
    """Stages last as long as on a GPU, without a core: two are enough for all of them."""
    originals = []
    never = threading.Event()

    def slowed(original: Any, seconds: float) -> Any:
        def slow(*arguments: Any, **more: Any) -> Any:
            ends_at = time.perf_counter() + seconds
            result = original(*arguments, **more)
            never.wait(max(ends_at - time.perf_counter(), 0.0))
            return result

        return slow

    for role, seconds in (("target", target_s), ("drafter", drafter_s)):
        owner, name = PLACES[role]
        originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, slowed(getattr(owner, name), seconds))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


if __name__ == "__main__":
    main()
