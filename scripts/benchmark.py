"""Times target and drafter alone, then the pipeline that overlaps them, on one recipe and this machine.

Alone means: nothing else runs, every core (or the whole GPU) is the stage's, batches are made beforehand. In turn, the
two reach T x D / (T + D); the pipeline's rate is shown as a share of that, and of the slower stage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from helixctl.data import sequence as order
from helixctl.data.batch import MicroBatch
from helixctl.data.prepare import prepare
from helixctl.data.store import Store
from helixctl.machine import read_machine
from helixctl.plan import Plan, make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training.build import Targets, build_drafter, make_loader, make_slot_for
from helixctl.training.loop import Drafter, autocast
from helixctl.training.optim import gradients, make_optimizer, take_step
from helixctl.training.process import set_up_process
from helixctl.training.run import run_training
from helixctl.training.stages import fill_slot

WARM_UP = 3
"""Micro-batches before a measurement."""


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    options = parse_options()
    found = measure_prepare(options) if options.prepare else measure_pipeline(options)
    table = Table("measured", "value", box=None)
    for name, value in found.items():
        table.add_row(name, shown(value))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def shown(value: Any) -> str:
    """A number with as many digits as it deserves."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in helixctl")
    parser.add_argument("--batches", type=int, default=30, help="micro-batches per measurement")
    parser.add_argument("--prepare", action="store_true", help="time `helixctl prepare` of the recipe instead")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    return parser.parse_args()


def measure_pipeline(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of target, drafter and pipeline, one after the other in this process."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            "validation.every_steps=0",
            "target.feature_cache_mib=0",
            "metrics.sinks=[jsonl]",
            f"run.dir={folder}/run",
            f"train.steps={options.batches + WARM_UP}",
            f"train.log_every_steps={WARM_UP}",
        ]
        plan = make_plan(load_recipe(options.recipe, [*options.set, *fixed]), read_machine())
        set_up_process(plan)
        store = Store.open(plan.recipe.data.store)
        sequence = order.Sequence(plan.batches_per_step, options.batches + WARM_UP)
        loader = make_loader(plan, store, sequence)
        batches = [loader.batch(seq) for seq in range(options.batches + WARM_UP)]
        targets = Targets(plan)
        target = targets.on(plan.target_devices[0])
        target_rate = rate(batches, target.features)
        drafter_rate = drafter_alone(plan, targets, batches)
        del target, targets
        result = run_training(plan)
        pipeline_rate = window_rate(Path(folder) / "run" / "metrics.jsonl")
    in_turn = target_rate * drafter_rate / (target_rate + drafter_rate)
    return {
        **machine_facts(),
        "target alone, tokens/s": target_rate,
        "drafter alone, tokens/s": drafter_rate,
        "in turn (T x D / (T + D)), tokens/s": in_turn,
        "pipeline, tokens/s": pipeline_rate,
        "pipeline / in turn": pipeline_rate / in_turn,
        "pipeline / slower stage": pipeline_rate / min(target_rate, drafter_rate),
        **{f"peak memory, {where}, MiB": size / 2**20 for where, size in result.peak_memory_bytes.items()},
    }


def drafter_alone(plan: Plan, targets: Targets, batches: Sequence[MicroBatch]) -> float:
    """Loss, backward and optimizer step on slots that are filled beforehand, a few in turn."""
    device = torch.device(plan.drafter_devices[0])
    model, shared = build_drafter(plan, device), targets.shared_on(plan.drafter_devices[0])
    drafter = cast(Drafter, model)
    optimizer = make_optimizer(model, plan.recipe.train)
    gradients(optimizer)
    slots = [make_slot_for(plan, device) for _ in range(min(4, len(batches)))]
    for slot, batch in zip(slots, batches, strict=False):
        fill_slot(slot, batch, targets.on(plan.target_devices[0]).features(batch))
    filled = [batches[i % len(slots)] for i in range(len(batches))]

    def step(batch: MicroBatch) -> None:
        slot = next(slot for slot in slots if slot.batch is batch)
        with autocast(plan, device):
            terms = drafter.loss(slot, shared)
        terms.numerator.backward()
        take_step(optimizer, terms.denominator.float(), plan.recipe.train.learning_rate, 1.0)

    return rate(filled, step)


def rate(batches: Sequence[MicroBatch], work: Callable[[MicroBatch], object]) -> float:
    """Real tokens per second of ``work`` over the batches behind the warm-up."""
    for batch in batches[:WARM_UP]:
        work(batch)
    wait()
    began_at = time.perf_counter()
    for batch in batches[WARM_UP:]:
        work(batch)
    wait()
    return sum(batch.num_tokens for batch in batches[WARM_UP:]) / (time.perf_counter() - began_at)


def window_rate(metrics: Path) -> float:
    """Tokens per second of the run behind its first window, which holds the warm-up."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    windows = [line for line in lines if "perf/tokens_per_s" in line]
    steps = [b["step"] - a["step"] for a, b in itertools.pairwise(windows)]
    tokens = sum(w["perf/tokens_per_s"] * w["perf/step_ms"] / 1000 * n for w, n in zip(windows[1:], steps, strict=True))
    seconds = sum(w["perf/step_ms"] / 1000 * n for w, n in zip(windows[1:], steps, strict=True))
    return float(tokens / seconds)


def measure_prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of `prepare` into a temporary store."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(options.recipe, [*options.set, f"data.store={folder}/store"])
        result = prepare(recipe)
    return {
        **machine_facts(),
        "documents read": result.read,
        "documents kept": result.kept,
        "tokens": result.tokens,
        "workers": recipe.data.workers,
        "seconds": result.elapsed_s,
    }


def machine_facts() -> dict[str, Any]:
    """What the numbers were measured on."""
    machine = read_machine()
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or "none"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "CPUs": machine.num_cpus,
        "processor": processor(),
        "GPUs": gpus,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """The processor's name, with the instructions that decide the speed of bfloat16."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "?")
    flags = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in text]
    return f"{name} ({', '.join(flags) or 'no bfloat16 instructions'})"


def wait() -> None:
    """Let every GPU finish, so that the clock is right."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
