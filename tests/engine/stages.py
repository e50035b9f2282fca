"""Fake stages made of functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from helixctl.engine.supervisor import Limits

LIMITS = Limits(start_timeout_s=20.0, stall_timeout_s=20.0, join_timeout_s=20.0)


def nothing() -> None:
    pass


@dataclass
class FakeStage:
    """Calls its functions, and notes in ``log``, which several stages may share, what was called."""

    name: str
    on_run: Callable[[], Any] = nothing
    on_setup: Callable[[], Any] = nothing
    on_teardown: Callable[[], Any] = nothing
    log: list[str] = field(default_factory=list)

    def setup(self) -> None:
        self.log.append(f"{self.name} setup")
        self.on_setup()

    def run(self) -> None:
        self.log.append(f"{self.name} run")
        self.on_run()

    def teardown(self) -> None:
        self.log.append(f"{self.name} teardown")
        self.on_teardown()


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
