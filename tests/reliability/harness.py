"""Runs a case in a child process, measures it, resumes it, and compares with a run that nothing happened to."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixctl.checkpoint.store import latest_checkpoint, load_checkpoint
from tests.fork_server import Child, ForkServer
from tests.lm_worlds import make_lm_world
from tests.reliability.cases import STALL_S, Case
from tests.reliability.faults import FAULT, JOIN_S, LM_PLACES, PLACES
from tests.training.worlds import make_world, tensors_equal

SETTINGS = ("train.log_every_steps=1", "pipeline.threads=1", "checkpoint.keep_last=20")
ATTEMPTS, LATE = 3, "detected after"
CLOCKED = ("time", "perf/")


@dataclass(frozen=True)
class World:
    """A kind of training in small."""

    make: Callable[[Path], Path]
    """Writes what a run needs into a folder, and the recipe, whose path it returns."""
    steps: int
    stem: str
    """File of a checkpoint's parameters."""
    settings: tuple[str, ...] = ()


DRAFTER = World(make_world, 12, "drafter", ("train.steps=12",))
CAUSAL_LM = World(make_lm_world, 8, "model")


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    exit_code: int
    output: str
    detection_s: float
    """From the fault to the end of the process, everything told and cleaned up."""
    orphans: tuple[int, ...]
    """Processes that outlived it."""
    checkpoint_step: int | None
    """Newest checkpoint that passes its checksums."""
    damaged: int
    """Checkpoints that do not."""
    leftovers: bool
    """A run.pid or unfinished folders, where the process could have cleaned up."""
    accounting: dict[str, int]
    """Of the run's end; empty where it had none."""
    same_parameters: bool
    """After a resume, or at once where the run went on: bit-equal to the undisturbed run."""
    same_metrics: bool


class Harness:
    """One small world and its undisturbed run, for many cases."""

    def __init__(
        self, server: ForkServer, folder: Path, settings: tuple[str, ...] = (), world: World = DRAFTER
    ) -> None:
        self._server = server
        self._folder = folder
        self._settings = settings + world.settings
        self._world = world
        self._num_cases = 0
        self._recipe = world.make(folder)
        code = self.start("whole").wait()
        assert code == 0, "the undisturbed run failed"

    def start(self, name: str, *arguments: str, fault: str | None = None) -> Child:
        values = [f"run.dir={self.run_dir(name)}", *SETTINGS, *self._settings]
        words = ["train", str(self._recipe), *(word for value in values for word in ("--set", value)), *arguments]
        return self._server.start(words, self._folder / "logs", {} if fault is None else {FAULT: fault})

    def run_dir(self, name: str) -> Path:
        return self._folder / name

    def run(self, case: Case, nth: int | None = None) -> Outcome:
        """Make the fault happen, at another call if so asked, then `train --resume` unless the run came to its end."""
        self._num_cases += 1
        name = f"{self._num_cases}-{case.name.replace(' ', '-').replace(':', '')}"
        mark = self._folder / f"{name}.instant"
        more = [word for value in case.settings for word in ("--set", value)]
        child = self.start(
            name, *more, fault=f"{case.role}/{case.fault}/{nth or (PLACES | LM_PLACES)[case.role].nth}/{mark}"
        )
        code = child.wait()
        ended_at = time.monotonic()
        assert mark.exists(), f"{case.name} never happened: {child.output}"
        checkpoints = latest_checkpoint(self.run_dir(name) / "checkpoints")
        outcome: dict[str, Any] = {
            "exit_code": code,
            "output": child.output,
            "detection_s": ended_at - float(mark.read_text()),
            "orphans": tuple(of_session(child.pid)),
            "checkpoint_step": checkpoints.step,
            "damaged": len(checkpoints.skipped),
            "leftovers": self._has_leftovers(name),
            "accounting": self._accounting(name),
        }
        if code:
            resumed = self.start(name, *more, "--resume")
            assert resumed.wait() == 0, resumed.output
        return Outcome(**outcome | self.compare(name))

    def run_damaged(self, damage: str) -> bool:
        """Damage the newest checkpoint of a finished run and resume: passed over by name, and trained again."""
        name = f"damaged {damage}".replace(" ", "-")
        shutil.copytree(self.run_dir("whole"), self.run_dir(name))
        file = self.run_dir(name) / "checkpoints" / f"step-{self._world.steps:08d}" / f"{self._world.stem}.safetensors"
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        if damage == "file missing":
            file.unlink()
        else:
            file.write_bytes(damaged if damage == "changed byte" else damaged[:-100])
        child = self.start(name, "--resume")
        code, told = child.wait(), "a damaged checkpoint is passed over" in " ".join(child.output.split())
        return code == 0 and told and all(self.compare(name).values())

    def compare(self, name: str) -> dict[str, bool]:
        """With the undisturbed run."""
        own, whole = self.run_dir(name), self.run_dir("whole")
        last, parts = f"step-{self._world.steps:08d}", (self._world.stem, "optimizer")
        one, other = (load_checkpoint(path / "checkpoints" / last).tensors for path in (own, whole))
        return {
            "same_parameters": all(tensors_equal(one[part], other[part]) for part in parts),
            "same_metrics": metrics(own) == metrics(whole),
        }

    def _has_leftovers(self, name: str) -> bool:
        run_dir = self.run_dir(name)
        return (run_dir / "run.pid").exists() or any((run_dir / "checkpoints").glob(".*"))

    def _accounting(self, name: str) -> dict[str, int]:
        path = self.run_dir(name) / "result.json"
        return dict(json.loads(path.read_text())["accounting"]) if path.exists() else {}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every line, without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(CLOCKED)} for line in lines]


def of_session(session: int) -> Iterator[int]:
    """Processes of a session."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getsid(int(entry.name)) == session:
                    yield int(entry.name)
            except OSError:
                continue


def judge(case: Case, run: Callable[[], Outcome]) -> tuple[Outcome, list[str]]:
    """The outcome of ``run`` and what is wrong with it; what is late on a busy machine is tried again."""
    for _ in range(ATTEMPTS):
        outcome = run()
        found = faults_found(case, outcome)
        if any(LATE not in what for what in found) or not found:
            break
    return outcome, found


def faults_found(case: Case, outcome: Outcome) -> list[str]:
    """Everything in which the outcome is not what it must be."""
    text = " ".join(outcome.output.split())
    spoiled = case.fault.startswith("NaN")  # what was left out or skipped before the end stays so
    lossy = case.role == "metric sink" and case.exit_code == 0
    limit_s = 2.0 if case.fault != "hang in C" else 2.0 + STALL_S + JOIN_S
    books = outcome.accounting
    checks = {
        f"exit code {outcome.exit_code}": outcome.exit_code == case.exit_code,
        f"{case.shows!r} is not shown": case.shows in text,
        "no traceback": not case.traceback or "Traceback" in outcome.output,
        "a traceback": case.traceback or case.fault == "hang in C" or "Traceback" not in outcome.output,
        f"{LATE} {outcome.detection_s:.2f} s": case.exit_code == 0 or outcome.detection_s < limit_s,
        f"left alive: {outcome.orphans}": not outcome.orphans,
        "no whole checkpoint": outcome.checkpoint_step is not None and not outcome.damaged,
        "leftovers": not outcome.leftovers or case.exit_code == -9 or case.fault == "hang in C",
        "other parameters than the undisturbed run": outcome.same_parameters or spoiled,
        "other metrics than the undisturbed run": outcome.same_metrics or spoiled or lossy,
        f"the sums do not add up: {books}": not books or adds_up(books),
    }
    return [what for what, is_right in checks.items() if not is_right]


def adds_up(books: dict[str, int]) -> bool:
    """Documents read = kept + dropped; micro-batches produced = trained + validated + in flight."""
    dropped = sum(count for name, count in books.items() if name.startswith("documents dropped"))
    parts = ("trained", "validated", "in flight at the end")
    return (
        books["documents read"] == books["documents kept"] + dropped
        and books["micro-batches produced"] == sum(books[f"micro-batches {part}"] for part in parts)
        and books["micro-batches in flight at the end"] >= 0
    )
