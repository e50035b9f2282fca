"""What profiling costs a run that goes on: its speed with and without the profiler, in turns, in one and the same run.

    python scripts/profile_cost.py PID [PAIRS] [SECONDS]

The order within a pair changes every time, so that a drift of the speed counts for neither side. Needs a run without
validation and checkpoints in between, and a machine on which nothing else runs. Ctrl-C shows what there is.
"""

from __future__ import annotations

import argparse
import math
import select
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from helixctl.profiling.pipeline import Status, StatusReader
from helixctl.profiling.recording import Options, Recorder, cores_used, num_cores
from helixctl.profiling.runs import run_dir_of

LOOK_S = 0.02


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", type=int, help="a run of helixctl")
    parser.add_argument("pairs", type=int, nargs="?", default=20)
    parser.add_argument("seconds", type=float, nargs="?", default=5.0, help="with and without, each")
    options = parser.parse_args()
    pid, pairs, seconds = options.pid, options.pairs, options.seconds
    run_dir = run_dir_of(pid)
    if run_dir is None:
        parser.error(f"process {pid} is no run of helixctl")
    ratios, cores = [], []
    try:
        for pair in range(pairs):
            speeds = {}
            for profiled in (pair % 2 == 0, pair % 2 == 1):
                first = fresh(run_dir, pid)
                cores += [look(pid, seconds)] if profiled else []
                if not profiled:
                    pause(seconds)
                last = fresh(run_dir, pid)
                tokens = last["counters"]["trained_tokens"] - first["counters"]["trained_tokens"]
                speeds[profiled] = tokens / (last["at_s"] - first["at_s"])
            ratios.append(math.log(speeds[True] / speeds[False]))
    except KeyboardInterrupt:  # what has been measured counts
        pairs = len(ratios)
    if pairs < 2:
        Console().print("two pairs at least say something")
        return 1
    error = statistics.stdev(ratios) / math.sqrt(pairs)
    Console().print(
        f"speed with / without: {math.exp(statistics.fmean(ratios)):.4f} ± {error:.4f}, "
        f"median {math.exp(statistics.median(ratios)):.4f}, {pairs} pairs of {seconds:g} s; "
        f"profiler: {statistics.fmean(cores):.4f} of {num_cores()} cores"
    )
    return 0


def look(pid: int, seconds: float) -> float:
    """Profile at the default rates; returns the cores that it took."""
    with tempfile.TemporaryDirectory() as folder:
        return cores_used(Recorder(pid, None, Options(seconds=seconds), Path(folder)).record())


def fresh(run_dir: Path, pid: int) -> Status:
    """The next status that the run writes."""
    reader = StatusReader(run_dir, pid)
    reader.read()
    while (status := reader.read()) is None:
        pause(LOOK_S)
    return status


def pause(seconds: float) -> None:
    """Let time pass."""
    select.select([], [], [], seconds)


if __name__ == "__main__":
    sys.exit(main())
