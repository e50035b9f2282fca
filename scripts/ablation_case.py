"""Trains one variant of a recipe and decodes prompts with what came of it; prints one line of JSON.

`scripts/ablation.py` calls it for every variant.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from helixctl.errors import Interrupted
from helixctl.machine import read_machine
from helixctl.plan import Plan, make_plan
from helixctl.recipe.load import load_recipe
from helixctl.recipe.schema import ScheduleOptions
from helixctl.training import loop
from helixctl.training.commands import ExportRequest, run_export
from helixctl.training.conversations import Choice
from helixctl.training.optim import learning_rate_scale
from helixctl.training.recorder import Recorder
from helixctl.training.run import run_training
from helixctl.training.validate import ValidationRequest, run_validation
from scripts.suspects import SUSPECTS, under_suspicion

NEVER = 1_000_000_000
"""Steps that no variant takes."""
FIXED = (
    "validation.every_steps=0",
    f"checkpoint.every_steps={NEVER}",
    "checkpoint.keep_last=1",
    "metrics.sinks=[jsonl]",
    "train.epochs=null",
)


def main(words: Sequence[str] | None = None) -> None:
    """Train, decode, print."""
    options = parse_options(words)
    plan = make_case_plan(options)
    with under_suspicion(options.suspect, plan):
        found = train(plan, options.seconds)
    if options.export:
        run_export(plan, ExportRequest(output=options.export))
    print(json.dumps({**found, **decode(plan, options)}), flush=True)


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True, help="an empty folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in helixctl")
    parser.add_argument("--suspect", choices=sorted(SUSPECTS), help="a habit of other trainers")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--seconds", type=float, help="of training, from the first micro-batch on")
    budget.add_argument("--steps", type=int)
    parser.add_argument("--bench", action="append", type=Path, required=True, metavar="FILE")
    parser.add_argument("--skip", type=int, default=0, help="prompts of every file")
    parser.add_argument("--limit", type=int, help="prompts of every file")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--export", type=Path, help="also write the drafter in its published format")
    return parser.parse_args(words)


def make_case_plan(options: argparse.Namespace) -> Plan:
    """The variant's plan: nothing is validated, and only the last step is saved."""
    budget = f"train.steps={options.steps or NEVER}"
    overrides = [*options.set, *FIXED, budget, f"run.dir={options.run_dir}"]
    return make_plan(load_recipe(options.recipe, overrides), read_machine())


class Clock:
    """Seconds in place of steps: the schedule follows them, and the run ends with them."""

    RESOLUTION = 100_000
    """Steps that the schedule is asked in."""

    def __init__(self, seconds: float, options: ScheduleOptions) -> None:
        self._seconds = seconds
        self._options = options
        self._started_at = time.perf_counter()

    def start(self) -> None:
        """Training begins."""
        self._started_at = time.perf_counter()

    @property
    def share(self) -> float:
        """Of the seconds that have passed."""
        return (time.perf_counter() - self._started_at) / self._seconds

    def learning_rate(self, _step: int) -> float:
        """At this moment."""
        step = min(round(self.share * self.RESOLUTION), self.RESOLUTION - 1)
        return self._options.learning_rate * learning_rate_scale(step, self.RESOLUTION, self._options)

    def begins_fresh(self, _step: int) -> bool:
        """A drafter has one training stage."""
        return False


@contextmanager
def timed(clock: Clock) -> Iterator[None]:
    """Training inside goes by the clock; a signal still stops it earlier."""
    started, must_stop = Recorder.started, loop.TrainerStage._must_stop

    def start(self: Recorder) -> None:
        started(self)
        clock.start()

    def is_over(self: loop.TrainerStage) -> bool:
        return clock.share >= 1.0 or must_stop(self)

    with (
        patch.object(loop, "make_schedule", lambda _plan: clock),
        patch.object(Recorder, "started", start),
        patch.object(loop.TrainerStage, "_must_stop", is_over),
    ):
        yield


def train(plan: Plan, seconds: float | None) -> dict[str, Any]:
    """Train for the plan's steps, or for ``seconds``; what the run says of itself.

    Raises:
        Interrupted: somebody stopped it.
    """
    began_at = time.perf_counter()
    clock = None if seconds is None else Clock(seconds, plan.recipe.train)
    try:
        with nullcontext() if clock is None else timed(clock):
            run_training(plan)
    except Interrupted:
        if clock is None or clock.share < 1.0:
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    result = json.loads((plan.recipe.run.dir / "result.json").read_text(encoding="utf-8"))
    return {
        "steps": result["steps"],
        "train s": result["train_seconds"],
        "tokens/s": result["tokens_per_s"],
        "epochs": result["accounting"]["documents trained"] / max(1, plan.train_documents or 1),
        "loss": result["loss"],
        "start-up s": time.perf_counter() - began_at - result["train_seconds"],
        "memory GiB": max(result["peak_memory_bytes"].values()) / 2**30,
    }


def decode(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """Score by file, as `helixctl validate --bench --acceptance-only` defines it, and what every prompt gave."""
    began_at = time.perf_counter()
    choice = Choice(options.skip, options.limit, 1)
    request = ValidationRequest(
        bench=tuple(options.bench), choice=choice, max_new_tokens=options.max_new_tokens, acceptance_only=True
    )
    result = run_validation(plan, request)
    prompts: dict[str, list[float | None]] = {source.source: [] for source in result.sources}
    for prompt in result.prompts:
        prompts[prompt.source].append(prompt.accept_len and round(prompt.accept_len, 4))
    scores = {source.source: source.score for source in result.sources}
    return {"scores": scores, "prompts": prompts, "decoding s": time.perf_counter() - began_at}


if __name__ == "__main__":
    main()
