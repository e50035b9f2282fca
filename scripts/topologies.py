"""Topologies of targets and drafters on all GPUs of this host, each in processes of its own; most important first.

    python -m scripts.topologies --out topologies.jsonl          every GPU of the machine, in under 9 minutes
    python -m scripts.topologies --cpu --stage-ms 60 110         6 + 2 loops in threads, stages as long as on a GPU

Random weights (`scripts/shapes.py`). Every finished case is one JSON line in --out at once: a call that is cut short
leaves what it measured, and the next one goes on behind it. Small topologies run side by side. The case `alone` of a
workload times both stages; the simulation (`simulate_scale.py`) and the plan's arithmetic (`placement.py`) predict the
others from it. The workload `8b-packed` has documents of about 550 tokens with 256 anchors in each; `8b-256` has 256
anchors in a row of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from helixctl.machine import read_machine
from helixctl.plan import advised_slots
from helixctl.training.placement import Pace, expected
from scripts.shapes import FAULT_AT
from scripts.simulate_scale import Costs, Layout, Links, reduce_seconds, simulate

ROOT = Path(__file__).resolve().parents[1]
MEASURE_S = 12.0
"""Seconds of a measurement, unless that is fewer than ``FEWEST`` steps or more than ``MOST``."""
FEWEST, MOST = 4, 40
CASE_S = 200.0
"""A case that takes longer is ended."""
LEAST_S = 45.0
"""With less time left no further case is started."""
MAX_WORDS = 300
"""Characters of what a failed case said at its end."""


@dataclass(frozen=True)
class Workload:
    """A shape and its documents."""

    shape: str
    mean_length: int | None = None
    settings: tuple[str, ...] = ()


PACKED = ("drafter.num_anchors=1536", "drafter.anchors_per_document=256")
WORKLOADS = {
    "8b": Workload("8b"),
    "8b-packed": Workload("8b", 550, PACKED),
    "8b-256": Workload("8b", 550, ("drafter.num_anchors=256",)),
    "27b": Workload("27b"),
    "tiny": Workload("tiny"),
    "tiny-packed": Workload("tiny", 40),
}


@dataclass(frozen=True)
class Case:
    """One topology with one workload. Targets and drafters are those of each process."""

    workload: str
    targets: int = 1
    drafters: int = 1
    processes: int = 1
    together: bool = False
    """A target and a drafter on every GPU."""
    kind: str = "pipeline"
    """Or alone, or the role of the stage that fails."""

    @property
    def name(self) -> str:
        """As tables show it."""
        if self.kind == "alone":
            return "alone"
        own = f"together on {self.targets}" if self.together else f"{self.targets}+{self.drafters}"
        own = own if self.processes == 1 else f"{self.processes} x {own}"
        return own if self.kind == "pipeline" else f"{own}, {self.kind} fails"

    @property
    def gpus(self) -> int:
        """Of all processes."""
        own = 1 if self.kind == "alone" else self.targets + (0 if self.together else self.drafters)
        return self.processes * own

    def devices(self, *, cpu: bool) -> tuple[list[str], list[str]]:
        """Of the targets and of the drafters; numbers begin at the process's first GPU."""
        if cpu:
            return ["cpu"] * self.targets, ["cpu"] * self.drafters
        first = 0 if self.together or self.kind == "alone" else self.targets
        return [f"cuda:{i}" for i in range(self.targets)], [f"cuda:{first + i}" for i in range(self.drafters)]


def eight(workload: str, *, small: bool = True) -> Iterator[Case]:
    """The topologies of one host of eight GPUs, the two small ones last."""
    yield Case(workload, 6, 2)
    yield Case(workload, 8, 8, together=True)
    yield Case(workload, 4, 4)
    yield Case(workload, 1, 7)
    if small:
        yield Case(workload, 2, 2)
        yield Case(workload, 1, 1)


def gpu_cases(num_gpus: int) -> list[Case]:
    """Most important first; on fewer than eight GPUs also each of its GPUs with both."""
    cases = [Case("8b", kind="alone"), Case("8b-packed", kind="alone"), Case("27b", kind="alone")]
    cases += [Case("8b", 6, 2), Case("8b-packed", 8, 8, together=True), Case("8b", 8, 8, together=True)]
    cases += [Case("8b-packed", 1, 7), Case("8b", 4, 4), Case("8b", 1, 1), Case("8b", 2, 2), Case("27b", 6, 2)]
    cases += [Case("27b", 8, 8, together=True), Case("8b", 3, 1, processes=2), Case("8b", 6, 2, kind="drafter")]
    cases += [Case("8b", 6, 2, kind="target"), Case("8b", 1, 7), *eight("27b"), *eight("8b-packed", small=False)]
    cases += [Case("8b", 1, 1, processes=8, together=True), Case("8b-256", 8, 8, together=True)]
    if 1 <= num_gpus < 8:
        own = [Case(w, num_gpus, num_gpus, together=True) for w in ("8b", "8b-packed", "27b")]
        own += [Case("8b", num_gpus, num_gpus, together=True, kind=role) for role in ("target", "drafter")]
        if num_gpus >= 2:
            own += [Case("8b", 1, 1, processes=num_gpus, together=True), Case("8b", 1, 1, together=True)]
        if num_gpus >= 4:
            own.append(Case("8b", 1, 1, processes=2))
        cases = [*cases[:3], *own, *cases[3:]]
    return list(dict.fromkeys(cases))


def cpu_cases(*, sleeping: bool) -> list[Case]:
    """The same code with threads on the CPU; stages that sleep share nothing, so none is together with another."""
    cases = [Case("tiny", kind="alone"), Case("tiny-packed", kind="alone"), Case("tiny", 6, 2)]
    cases += [Case("tiny", 3, 1, processes=2), *eight("tiny"), Case("tiny-packed", 6, 2)]
    cases += [Case("tiny", 6, 2, kind="target"), Case("tiny", 6, 2, kind="drafter")]
    return [case for case in dict.fromkeys(cases) if not (sleeping and case.together)]


def take_wave(waiting: list[Case], gpus: Sequence[str]) -> list[tuple[Case, list[str]]]:
    """The first case and what of its kind fits beside it, with GPUs for each; taken out of ``waiting``.

    Without GPUs the first alone.
    """
    free, wave = list(gpus), list[tuple[Case, list[str]]]()
    for case in list(waiting):
        if wave and (not gpus or case.gpus > len(free) or case.kind != wave[0][0].kind):
            continue
        wave.append((case, free[: case.gpus]))
        free = free[case.gpus :]
        waiting.remove(case)
    return wave


class Bench:
    """Starts cases, in waves that fill the GPUs, and writes down what came of each."""

    def __init__(self, options: argparse.Namespace, gpus: list[str]) -> None:
        """``gpus``: as CUDA_VISIBLE_DEVICES calls them."""
        self._options, self._gpus = options, gpus
        self._ends_at = time.monotonic() + options.limit_s
        self._paces: dict[str, dict[str, float]] = {}
        self.lines: list[dict[str, Any]] = []

    def run(self, cases: list[Case]) -> None:
        """All cases that fit the machine and the time."""
        waiting, known = [], self._known()
        for case in cases:
            if (case.workload, case.name) in known:
                self._note(case, known[case.workload, case.name])
            elif self._options.cpu or case.gpus <= len(self._gpus):
                waiting.append(case)
            else:
                self._write(case, {"skipped": f"needs {case.gpus} GPUs, there are {len(self._gpus)}"})
        with tempfile.TemporaryDirectory() as folder:
            while waiting and self._left_s() > (0 if self._options.cpu else LEAST_S):
                self._run_wave(take_wave(waiting, self._gpus), Path(folder))
        for case in waiting:
            self._write(case, {"skipped": f"no time left of {self._options.limit_s:g} s"})

    def _known(self) -> dict[tuple[str, str], dict[str, Any]]:
        """What an earlier call measured, by workload and topology."""
        out = self._options.out
        lines = [json.loads(text) for text in out.read_text().splitlines()] if out and out.exists() else []
        return {(line["workload"], line["topology"]): line for line in lines if not {"skipped", "failed"} & set(line)}

    def _left_s(self) -> float:
        left: float = self._ends_at - time.monotonic()
        return left

    def _run_wave(self, wave: list[tuple[Case, list[str]]], folder: Path) -> None:
        started = [(case, self._start(case, gpus, folder)) for case, gpus in wave]
        ends_at = time.monotonic() + min(self._left_s(), CASE_S)
        for case, (process, out, began_at) in started:
            try:
                process.wait(max(ends_at - time.monotonic(), 0.1))
                found = self._read(process, out)
            except subprocess.TimeoutExpired:
                found = {"failed": "took too long"}
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the session of its own that `_start` made
                    process.wait()
            if "failed at" in found:
                found["process gone after s"] = time.monotonic() - found.pop("failed at")
            self._write(case, {**found, "seconds in all": time.monotonic() - began_at})

    def _start(self, case: Case, gpus: list[str], folder: Path) -> tuple[subprocess.Popen[bytes], Path, float]:
        out = folder / f"{len(self.lines)}-{case.workload}-{case.name}.txt".replace(" ", "-")
        environment = {**os.environ} if self._options.cpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with out.open("wb") as stream:
            process = subprocess.Popen(
                self._words(case),
                cwd=ROOT,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process, out, time.monotonic()

    def _words(self, case: Case) -> list[str]:
        work = WORKLOADS[case.workload]
        targets, drafters = (",".join(devices) for devices in case.devices(cpu=self._options.cpu))
        words = ["-m", "scripts.topology_case", "--shape", work.shape, "--targets", targets, "--drafters", drafters]
        words += ["--steps", str(self._steps(case))]
        words += ["--mean-length", str(work.mean_length)] if work.mean_length else []
        threads = ["pipeline.threads=1"] if self._options.cpu else []
        for value in (*threads, *work.settings, *self._options.set):
            words += ["--set", value]
        if self._options.stage_ms:
            words += ["--stage-ms", *map(str, self._options.stage_ms)]
        if case.kind != "pipeline":
            words += ["--alone"] if case.kind == "alone" else ["--fault", case.kind]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}"]
        return [sys.executable, *(launcher if case.processes > 1 else []), *words]

    def _steps(self, case: Case) -> int:
        """Enough to fill ``MEASURE_S``, as far as the stages' own times are known."""
        prediction = self._predict(case)
        if case.kind not in ("alone", "pipeline"):
            return 2 * FAULT_AT
        if self._options.steps or not prediction:
            return int(self._options.steps or 8)
        tokens = self._paces[case.workload]["tokens"] * case.drafters * case.processes
        return min(max(round(MEASURE_S * prediction["arithmetic tokens/s"] / tokens), FEWEST), MOST)

    def _read(self, process: subprocess.Popen[bytes], out: Path) -> dict[str, Any]:
        text = out.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith("{")]
        if process.returncode or not lines:
            return {"failed": f"exit code {process.returncode}: {text.strip()[-MAX_WORDS:]}"}
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def _note(self, case: Case, line: dict[str, Any]) -> None:
        if case.kind == "alone" and "target_s" in line:
            self._paces[case.workload] = line
        self.lines.append(line)

    def _write(self, case: Case, found: dict[str, Any]) -> None:
        if "tokens/s" in found:
            found |= self._predict(case)
        line = {"workload": case.workload, "topology": case.name, **_rounded(found)}
        self._note(case, line)
        if self._options.out:
            with self._options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        print(json.dumps({key: value for key, value in line.items() if key != "losses"}), flush=True)

    def _predict(self, case: Case) -> dict[str, float]:
        if case.workload not in self._paces:
            return {}
        values = self._paces[case.workload]
        pace = Pace(values["target_s"], values["drafter_s"], values["tokens"])
        return predict(case, pace, int(values["parameters"]), self._options)


def predict(case: Case, pace: Pace, parameters: int, options: argparse.Namespace) -> dict[str, float]:
    """Tokens per second by the plan's arithmetic; by the simulation where every loop has something for itself."""
    sleeping = bool(options.stage_ms)
    devices = case.devices(cpu=options.cpu and not sleeping)
    if sleeping:
        target_ms, drafter_ms = options.stage_ms
        pace = Pace(target_ms / 1000, drafter_ms / 1000, pace.tokens)
    processes = 1 if options.cpu and not sleeping else case.processes
    found = {"arithmetic tokens/s": processes * expected(pace, *devices).tokens_per_s}
    if options.cpu and not sleeping:
        return found
    slots = advised_slots(case.targets, case.drafters)
    layout = Layout(case.processes, case.targets, case.drafters, slots)
    if case.together:
        layout = Layout(case.processes * case.targets, 1, 1, 3, shared=True)
    costs = Costs(0.0, pace.target_s, 0.0, pace.drafter_s, pace.tokens)
    reduce_s = 0.0 if sleeping else reduce_seconds(parameters, layout, Links())
    return {**found, "simulated tokens/s": simulate(costs, layout, reduce_s).tokens_per_s}


def compare_processes(lines: Sequence[dict[str, Any]]) -> list[str]:
    """One process against several with as many drafters: ratio of speeds, largest difference of losses."""
    by_name = {(line["workload"], line["topology"]): line for line in lines if "tokens/s" in line}
    pairs = [("6+2", "2 x 3+1"), ("2+2", "2 x 1+1")]
    pairs += [(f"together on {n}", f"{n} x together on 1") for n in (2, 4, 8)]
    said = []
    for workload in WORKLOADS:
        for one, several in pairs:
            a, b = by_name.get((workload, one)), by_name.get((workload, several))
            if a and b:
                apart = max(abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=False))
                ratio = b["tokens/s"] / a["tokens/s"]
                said.append(f"{workload}: {several} / {one}: speed x {ratio:.2f}, losses at most {apart:.1e} apart")
    return said


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """What was measured beside what was predicted."""
    shown = Table(box=None, pad_edge=False)
    for name in ("workload", "topology", "tokens/s", "simulated", "arithmetic", "documents/s", "MFU"):
        shown.add_column(name, justify="left" if name in ("workload", "topology") else "right")
    for line in (line for line in lines if "tokens/s" in line):
        speeds = [line.get(key) for key in ("tokens/s", "simulated tokens/s", "arithmetic tokens/s", "documents/s")]
        words = ["" if speed is None else f"{speed:,.0f}" for speed in speeds]
        shown.add_row(line["workload"], line["topology"], *words, f"{line['MFU']:.3f}")
    return shown


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in found.items()}


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=530.0, help="of all cases together")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--only", help="cases whose workload and topology hold this text; comma between several")
    parser.add_argument("--steps", type=int, help=f"to measure per case; default: about {MEASURE_S:g} s of them")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in helixctl")
    parser.add_argument("--cpu", action="store_true", help="threads on the CPU, shape tiny")
    parser.add_argument(
        "--stage-ms", type=float, nargs=2, metavar=("TARGET", "DRAFTER"), help="with --cpu: let stages last so long"
    )
    options = parser.parse_args(words)
    if options.stage_ms and not options.cpu:
        parser.error("--stage-ms needs --cpu")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run what the machine can; 1 where a case failed."""
    options = parse_options(words)
    machine = read_machine()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(len(machine.gpus))]
    gpus = [] if options.cpu else names[: len(machine.gpus)]
    cases = cpu_cases(sleeping=bool(options.stage_ms)) if options.cpu else gpu_cases(len(gpus))
    if options.only:
        parts = options.only.split(",")
        chosen = [case for case in cases if any(part in f"{case.workload} {case.name}" for part in parts)]
        workloads = {case.workload for case in chosen}
        cases = [c for c in cases if c in chosen or (c.kind == "alone" and c.workload in workloads)]
    bench = Bench(options, gpus)
    bench.run(cases)
    console = Console(width=120)
    console.print(table(bench.lines))
    for sentence in compare_processes(bench.lines):
        console.print(sentence)
    return int(any("failed" in line for line in bench.lines))


if __name__ == "__main__":
    sys.exit(main())
