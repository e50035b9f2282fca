"""Faults, made inside of a child process: one role of the pipeline fails at its nth call, in a way that has a name.

Nothing of this is in the package: a fault replaces one function of the child, which behaves as ever until its call
comes. When it does, the instant is written to a file, so that the time to detection can be measured from outside.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

FAULT = "HELIXCTL_TEST_FAULT"
"""Environment variable: ``role/fault/nth/path of the file for the instant``; several calls are ``5+6``."""
HANG_S = 60
"""A hang ends by itself, should the process survive its detection."""
JOIN_S = 1.0
"""Instead of the supervisor's 10 s, so that a hang costs a test less."""


@dataclass(frozen=True)
class Place:
    """A function that a role calls again and again."""

    module: str
    name: str
    nth: int
    """Call that fails: late enough for a checkpoint to exist, before the end of a run of 12 steps."""


PLACES = {
    "reader": Place("helixctl.data.loader", "BatchLoader.batch", 10),
    "target": Place("helixctl.models.target", "Target.features", 10),
    "postprocess": Place("helixctl.training.stages", "fill_slot", 10),
    "drafter": Place("helixctl.training.loop", "TrainerStage._accumulate", 6),
    "validation": Place("helixctl.training.loop", "TrainerStage._evaluate", 3),
    "checkpoint writer": Place("helixctl.checkpoint.store", "save_file", 4),  # two files each
    "metric sink": Place("helixctl.metrics.sinks.jsonl", "JsonlSink.write", 5),
}
LM_PLACES = {  # a run of 8 steps
    "causal LM reader": Place("helixctl.data.lm_loader", "WindowLoader.batch", 9),
    "causal LM filler": Place("helixctl.training.lm_build", "fill_slot", 8),
    "causal LM trainer": Place("helixctl.training.loop", "TrainerStage._accumulate", 5),
}


def install_fault(text: str) -> None:
    """Replace the function that ``text`` names."""
    role, fault, nth, mark = text.split("/", 3)
    place = (PLACES | LM_PLACES)[role]
    owner: Any = import_module(place.module)
    *parents, name = place.name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), 0
    chosen = {int(number) for number in nth.split("+")}

    def replaced(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls not in chosen and not (fault == "NaN everywhere" and calls > min(chosen)):
            return original(*arguments, **options)
        if calls == min(chosen):
            Path(mark).write_text(repr(time.monotonic()))
        return FAULTS[fault](partial(original, *arguments, **options), *arguments)

    setattr(owner, name, replaced)
    wiring: Any = import_module("helixctl.training.wiring")
    wiring.Limits = partial(wiring.Limits, join_timeout_s=JOIN_S)


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(call: Callable[[], Any], *_: Any) -> Any:
        raise error

    return fail


def _hang(call: Callable[[], Any], *_: Any) -> Any:
    ctypes.CDLL(None).sleep(HANG_S)  # in C, without the interpreter's lock: as a stuck driver call
    return call()


def _signal(number: signal.Signals) -> Callable[..., Any]:
    def send(call: Callable[[], Any], *_: Any) -> Any:
        os.kill(os.getpid(), number)
        return call()

    return send


def _spoil(call: Callable[[], Any], stage: Any, *_: Any) -> Any:
    """NaN in what the role hands on: features, a filled slot, gradients, or validation sums."""
    result = call()
    features = result if isinstance(result, list) else getattr(stage, "features", None)
    if features is not None:
        for feature in features:
            feature[0, 0] = math.nan  # the first token of the first document
    else:
        stage._sums["loss_num"].fill_(math.nan)
        for parameter in stage._model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(math.nan)
    return result


def _spoil_all(call: Callable[[], Any], *_: Any) -> Any:
    """NaN in every document of the target's micro-batch: nothing is left to learn from."""
    features = call()
    for feature in features:
        feature.fill_(math.nan)
    return features


FAULTS: dict[str, Callable[..., Any]] = {
    "exception": _raise(RuntimeError("made to fail")),
    "out of memory": _raise(MemoryError("made to fail")),
    "hang in C": _hang,
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGKILL": _signal(signal.SIGKILL),
    "disk full": _raise(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "read-only": _raise(OSError(errno.EROFS, os.strerror(errno.EROFS))),
    "NaN once": _spoil,
    "NaN everywhere": _spoil,
    "NaN in all documents": _spoil_all,
}
