"""Every role with every fault that it can have, and what must come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.reliability.faults import LM_PLACES, PLACES

ROLES = tuple(PLACES)
STALL_S = 3.0
"""`pipeline.stall_timeout_s` of the runs that hang."""
DAMAGES = ("changed byte", "cut short", "file missing")


@dataclass(frozen=True)
class Case:
    """One fault in one role."""

    role: str
    fault: str
    exit_code: int
    """0: the run goes on to its end; negative: killed by that signal."""
    shows: str
    """Text that the user sees."""
    traceback: bool = False
    """The original traceback is shown: the fault is nothing that a user could mend."""
    settings: tuple[str, ...] = ()
    outcome: str = ""
    """In words, for the table."""

    @property
    def name(self) -> str:
        return f"{self.role}: {self.fault}"


def all_cases() -> Iterator[Case]:
    """In the order of the table."""
    for role in ROLES:
        yield from (_sink_cases if role == "metric sink" else _stage_cases)(role)
    yield Case(
        "target", "NaN once", 0, "left out", settings=("train.max_bad_fraction=0.5",), outcome="document left out"
    )
    yield Case("target", "NaN everywhere", 1, "train.max_bad_fraction", outcome="run fails: too many documents")
    yield Case("postprocess", "NaN once", 0, "", outcome="step skipped and counted")
    yield Case("drafter", "NaN once", 0, "", outcome="step skipped and counted")
    yield Case("drafter", "NaN everywhere", 1, "not finite in 3 consecutive steps", outcome="run fails, named")
    yield Case("validation", "NaN once", 0, "", outcome="shown as NaN, never the best")
    for fault, text in (("disk full", "No space left on device"), ("read-only", "Read-only file system")):
        yield Case("checkpoint writer", fault, 1, text, outcome="run fails, says where and the fix")


def lm_cases() -> Iterator[Case]:
    """What is not the same code as a drafter's: validation, checkpoints and sinks are."""
    for role in LM_PLACES:
        yield from _stage_cases(role)
    yield Case("causal LM trainer", "NaN once", 0, "", outcome="step skipped and counted")
    told = "not finite in 3 consecutive steps"
    yield Case("causal LM trainer", "NaN everywhere", 1, told, outcome="run fails, named")


WRITES_NOTHING = "writes nothing: checkpoints and metrics do"
IMPOSSIBLE = {
    ("reader", "NaN"): "makes token ids and masks, no floating point numbers",
    ("loader worker", "NaN"): "makes token ids and masks, no floating point numbers",
    ("checkpoint writer", "NaN"): "parameters stay finite: a step that is not is never taken (rows `drafter`, NaN)",
    ("metric sink", "NaN"): "a metric that is NaN is written as any other (row `validation`, NaN)",
    **{
        (role, fault): WRITES_NOTHING
        for role in ("reader", "loader worker", "target", "postprocess", "drafter", "validation")
        for fault in ("disk full", "read-only")
    },
}
"""Faults that a role cannot have, and why; damage of a checkpoint is a row of its own."""
ISSUE_ROLES = (*ROLES, "loader worker")
ISSUE_FAULTS = ("exception", "out of memory", "NaN", "hang in C", "disk full", "read-only", "SIGTERM", "SIGKILL")


def _stage_cases(role: str) -> Iterator[Case]:
    for fault, kind in (("exception", "RuntimeError"), ("out of memory", "MemoryError")):
        shown = f"{kind}: made to fail"
        yield Case(role, fault, 1, shown, traceback=True, outcome="run fails with its traceback")
    yield from _process_cases(role)


def _process_cases(role: str) -> Iterator[Case]:
    stalled = (f"pipeline.stall_timeout_s={STALL_S}",)
    yield Case(role, "hang in C", 1, "nothing moved for", settings=stalled, outcome="stall report and stacks")
    yield Case(role, "SIGTERM", 143, "--resume", outcome="step finished and saved")
    yield Case(role, "SIGKILL", -9, "", outcome="nothing but the last checkpoint is needed")


def _sink_cases(role: str) -> Iterator[Case]:
    for fault in ("exception", "out of memory", "disk full", "read-only"):
        yield Case(role, fault, 0, "training goes on", outcome="run goes on; failed writes counted in result.json")
    yield from _process_cases(role)
