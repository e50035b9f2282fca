"""HX004: processes are started by whatever method is the default.

What it checks
    Process, Pool, Manager and ProcessPoolExecutor without a context, in files that import torch.
Why it matters
    The default is fork up to Python 3.13 and forkserver from 3.14 on: the same code forks after CUDA on one version
    and fails to pickle its arguments on the next.
Fix
    Make them from get_context("spawn"), or pass mp_context=get_context("spawn").
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.cuda import process_starts
from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = ((b"torch", b"multiprocess"), (b"torch", b"ProcessPoolExecutor"))


def check(source: Source) -> Iterator[Hit]:
    """Starts without a method."""
    if "torch" not in source.imports:
        return
    for call, method in process_starts(source):
        if method == "default":
            name = call.name.rsplit(".", 1)[1]
            yield Hit(
                call.node, f"{name} starts processes by the default method, which differs between Python versions"
            )
