"""Whose work a thread does: native threads are counted to the stage that they serve."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OS_NAME_BYTES = 15
_AUTOGRAD = re.compile(r"pt_autograd_(\d+)")
_ROLES = (
    (re.compile(r"reader-\d+"), "reader"),
    (re.compile(r"target-\d+-post"), "post"),
    (re.compile(r"target-\d+"), "target"),
    (re.compile(r"filler"), "filler"),
    (re.compile(r"drafter-\d+"), "drafter"),
    (re.compile(r"trainer-\d+"), "trainer"),
)
ROLES = ("reader", "target", "post", "filler", "drafter", "trainer")
"""In the order of the pipeline."""
TRAINERS = ("drafter", "trainer")
"""Roles of the loops that take steps: of a drafter, of a causal LM."""
OTHER = "other"


@dataclass(frozen=True)
class Crew:
    """The stages of a run as the threads of its process."""

    stages: tuple[str, ...] = ()
    by_thread_id: Mapping[int, str] | None = None
    devices: Mapping[str, str] | None = None
    """Device of each drafter, e.g. ``cuda:1``."""

    def owner(self, thread_id: int, os_name: str, pid: int) -> str:
        """The stage that a thread works for; else what it is: the main thread, or its own name."""
        if self.by_thread_id and thread_id in self.by_thread_id:
            return self.by_thread_id[thread_id]
        for stage in self.stages:  # native threads inherit the name of the thread that made them
            if os_name == stage.encode()[:_OS_NAME_BYTES].decode("utf-8", "ignore"):
                return stage
        return self._native(os_name) or ("main" if thread_id == pid else os_name or OTHER)

    def _native(self, os_name: str) -> str | None:
        autograd = _AUTOGRAD.fullmatch(os_name)
        if autograd:
            trainers = [name for name in self.stages if role_of(name) in TRAINERS]
            here = [name for name in trainers if (self.devices or {}).get(name) == f"cuda:{autograd[1]}"]
            chosen = here or trainers
            return chosen[0] if chosen else None
        if os_name.startswith(("pt_data_pin", "pt_data_worker")):
            return next((name for name in self.stages if role_of(name) == "reader"), None)
        return None


def role_of(stage: str) -> str:
    """One of ``ROLES``; else ``other``."""
    return next((role for pattern, role in _ROLES if pattern.fullmatch(stage)), OTHER)


def in_order(stages: Sequence[str]) -> list[str]:
    """Stages along the pipeline, then the rest by name."""
    place = {role: i for i, role in enumerate((*ROLES, OTHER))}
    return sorted(stages, key=lambda stage: (place[role_of(stage)], stage))
