#!/usr/bin/env python3
"""Measures what worker processes of loaders cost before the first batch: a Markdown table for docs/loaders.md.

For every start method and number of workers: seconds until each worker has given a batch, of the first epoch and of the
second, whose workers live on. Every case runs in a process of its own, so that no server is warm by accident; "again"
is a second loader in that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import islice
from typing import Any

CASES = [(method, workers) for method in ("spawn", "forkserver") for workers in (1, 2, 4)]


def first_batches(loader: Any, num_batches: int) -> float:
    """Seconds until the loader has given so many batches of an epoch."""
    began_at = time.perf_counter()
    batches = islice(iter(loader), num_batches)
    assert len(list(batches)) == num_batches
    return time.perf_counter() - began_at


def measure(method: Any, num_workers: int) -> None:
    from helixctl.data.loaders import WorkerOptions, create_document_loader
    from helixctl.data.window_set import ListedDocuments
    from helixctl.data.windows import WindowOptions

    workers = WorkerOptions(num_workers=num_workers, start_method=method)
    options = WindowOptions(seq_len=64, rows=1, eos_id=0)
    seconds = []
    for _ in range(2):
        loader = create_document_loader(ListedDocuments([[1] * 63] * num_workers), options, workers=workers)
        seconds += [first_batches(loader, num_workers), first_batches(loader, num_workers)]
    print(f"| {method} | {num_workers} | " + " | ".join(f"{s:.2f}" for s in seconds[:3]) + " |")


def main() -> None:
    if len(sys.argv) == 3:
        measure(sys.argv[1], int(sys.argv[2]))
        return
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    print("| start | workers | first epoch, s | second epoch, s | another loader, s |\n|---|---|---|---|---|")
    for method, workers in CASES:
        done = subprocess.run(
            [sys.executable, __file__, method, str(workers)], check=True, capture_output=True, text=True
        )
        print(done.stdout, end="", flush=True)


if __name__ == "__main__":
    main()
