"""A short trace of kernels and CUDA calls of all threads of a run, made by the run itself when a profiler asks for it.

Outside cannot see them: CUPTI records only the process that it lives in. `helixctl profile RECIPE --cuda` leaves a
request in the run directory; a thread of the run starts torch.profiler, stops it after so many seconds (in the same
thread: others crash it), and leaves the trace and an answer beside it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from helixctl.engine.beside import called_beside

REQUEST, TRACE, ANSWER = "cuda-trace.request", "cuda-trace.json", "cuda-trace.answer"
NO_GPU = "the run uses no GPU, so there are no kernels and no CUDA calls to trace"
_THREAD = "cuda-trace"
_LOOK_S = 0.1
_WARM_UP_S = 0.5
"""Recorded, but left out by whoever reads it: starting CUPTI holds launches up for a while."""
_CUPTI = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
"""Else a CUDA graph that was captured before is replayed into freed memory after the trace."""


def traced_on_request(run_dir: Path) -> AbstractContextManager[None]:
    """While the block runs, answer requests for a trace that are left in ``run_dir``."""
    return called_beside(lambda ended: _answer(run_dir, ended), _THREAD, _LOOK_S)


def _answer(run_dir: Path, ended: threading.Event) -> None:
    try:
        seconds = float((run_dir / REQUEST).read_text(encoding="ascii"))
    except (OSError, ValueError):  # nobody asked, or has not finished writing
        return
    (run_dir / REQUEST).unlink()
    try:
        answer = trace(run_dir / TRACE, seconds, ended)
    except Exception as error:  # a profiler that fails must not end the run
        answer = {"problem": f"torch.profiler failed: {type(error).__name__}: {error}"}
    temporary = run_dir / f".{ANSWER}"
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.replace(run_dir / ANSWER)


def trace(path: Path, seconds: float, ended: threading.Event) -> dict[str, Any]:
    """Record ``seconds``, and a little before, to ``path`` in Chrome's trace format.

    Returns:
        ``problem``, None or why there is no trace; ``began_at`` and ``ended_at`` of the ``seconds``, on
        ``time.monotonic``.
    """
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {"problem": NO_GPU}
    for name, value in _CUPTI.items():
        os.environ.setdefault(name, value)
    config = _ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    recorder = profile(activities=activities, experimental_config=config, acc_events=True)  # without, torch 2.11 warns
    recorder.start()
    ended.wait(_WARM_UP_S)
    began_at = time.monotonic()
    ended.wait(seconds)
    times = {"began_at": began_at, "ended_at": time.monotonic()}
    recorder.stop()
    recorder.export_chrome_trace(str(path))
    return {"problem": None, **times}
