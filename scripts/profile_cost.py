"""What profiling costs a run that goes on: its speed with and without the profiler, in turns, in one and the same run.

    python scripts/profile_cost.py PID [PAIRS] [SECONDS]

Speed is taken from the ends of steps in the run's metrics.jsonl, so the run needs `--set train.log_every_steps=1`,
steps that are all alike (no validation, no checkpoints, no feature cache that fills meanwhile), and a machine on
which nothing else runs. The order within a pair changes every time, so that a drift of the speed counts for neither
side. The median over all steps forgives a host that pauses. Ctrl-C shows what there is.
"""

from __future__ import annotations

import argparse
import json
import math
import select
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from helixctl.profiling.recording import Options, Recorder, cores_used, num_cores
from helixctl.profiling.runs import run_dir_of


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", type=int, help="a run of helixctl")
    parser.add_argument("pairs", type=int, nargs="?", default=20)
    parser.add_argument("seconds", type=float, nargs="?", default=10.0, help="with and without, each")
    options = parser.parse_args()
    pid, seconds = options.pid, options.seconds
    run_dir = run_dir_of(pid)
    if run_dir is None:
        parser.error(f"process {pid} is no run of helixctl")
    ratios, cores = [], []
    steps: dict[bool, list[float]] = {True: [], False: []}
    try:
        for pair in range(options.pairs):
            means = {}
            for profiled in (pair % 2 == 0, pair % 2 == 1):
                start = time.time()
                cores += [look(pid, seconds)] if profiled else []
                if not profiled:
                    pause(seconds)
                seen = step_seconds(run_dir / "metrics.jsonl", start, time.time())
                steps[profiled] += seen
                means[profiled] = statistics.fmean(seen)
            ratios.append(math.log(means[False] / means[True]))
    except KeyboardInterrupt:  # what has been measured counts
        pass
    if len(ratios) < 2:
        Console().print("two pairs at least say something")
        return 1
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    Console().print(
        f"speed with / without: {math.exp(statistics.fmean(ratios)):.4f} ± {error:.4f}, by the median step "
        f"{statistics.median(steps[False]) / statistics.median(steps[True]):.4f} of {len(steps[True])} and "
        f"{len(steps[False])} steps, {len(ratios)} pairs of {seconds:g} s; "
        f"profiler: {statistics.fmean(cores):.4f} of {num_cores()} cores"
    )
    return 0


def step_seconds(metrics: Path, start: float, end: float) -> list[float]:
    """How long each step took that began and ended between two moments, in seconds since the epoch.

    Raises:
        ValueError: There is none.
    """
    ends = [row["time"] for row in map(json.loads, metrics.read_text().splitlines()) if "perf/step_ms" in row]
    inside = [last - first for first, last in pairwise(ends) if start <= first and last <= end]
    if not inside:
        raise ValueError("no whole step fits: give more seconds, and run with --set train.log_every_steps=1")
    return inside


def look(pid: int, seconds: float) -> float:
    """Profile at the default rates; returns the cores that it took."""
    with tempfile.TemporaryDirectory() as folder:
        return cores_used(Recorder(pid, None, Options(seconds=seconds), Path(folder)).record())


def pause(seconds: float) -> None:
    """Let time pass."""
    select.select([], [], [], seconds)


if __name__ == "__main__":
    sys.exit(main())
