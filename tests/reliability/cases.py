"""Every role with every fault that it can have, and what must come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.reliability.faults import PLACES

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
    yield Case("drafter", "NaN once", 0, "", outcome="step skipped and counted")
    yield Case("drafter", "NaN everywhere", 1, "not finite in 3 consecutive steps", outcome="run fails, named")
    yield Case("validation", "NaN once", 0, "", outcome="shown as NaN, never the best")
    for fault, text in (("disk full", "No space left on device"), ("read-only", "Read-only file system")):
        yield Case("checkpoint writer", fault, 1, text, outcome="run fails, says where and the fix")


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
