"""What the supervisor runs."""

from __future__ import annotations

from typing import Protocol


class Stage(Protocol):
    """One part of the pipeline; all three methods are called in the stage's own thread, in this order."""

    @property
    def name(self) -> str:
        """Unique; names the thread, also for the operating system (its first 15 bytes)."""

    def setup(self) -> None:
        """Load, compile, warm up. No other stage is set up or runs meanwhile."""

    def run(self) -> None:
        """Work until done; entered only when every stage has been set up."""

    def teardown(self) -> None:
        """Let go of everything; always called once ``setup`` was tried, whatever came after."""
