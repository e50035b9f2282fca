"""Progress for people: a bar with the remaining time on a terminal, one plain line per write elsewhere.

Together with ``cli/render.py`` the only module that prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from helixctl.metrics import names

_SHOWN = {
    names.TRAIN_LOSS: ("loss", ".4f"),
    names.TRAIN_ACCEPT_LEN: ("accept_len", ".3f"),
    names.PERF_TOKENS_PER_S: ("tokens/s", ",.0f"),
    names.VAL_LOSS: ("val loss", ".4f"),
    names.VAL_ACCEPT_LEN: ("val accept_len", ".3f"),
    names.LIVE_ACCEPT_LEN: ("live accept_len", ".3f"),
    names.TRAIN_BAD_STEPS: ("bad steps", ".0f"),
}


class ConsoleSink:
    """Shows loss, accept_len, tokens/s and the remaining time.

    Validation numbers are printed above the bar, so that they stay; nothing moves between writes (no refresh thread).
    """

    def __init__(self, console: Console, total_steps: int, first_step: int, clock: Callable[[], float]) -> None:
        self._console = console
        self._total_steps = total_steps
        self._first_step = first_step
        self._clock = clock
        self._started_at = clock()
        self._bar = _make_bar(console) if console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task("train", total=total_steps, completed=first_step, values="", eta="")
            self._bar.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show the numbers of a step."""
        text = _text(values)
        if not text:
            return
        eta = _duration(self._remaining_s(step))
        passing = names.TRAIN_LOSS in values
        if self._bar is None:
            self._line(f"step {step}/{self._total_steps}  {text}" + (f"  eta {eta}" if passing else ""))
        elif passing:
            self._bar.update(self._task, completed=step, values=text, eta=f"eta {eta}", refresh=True)
        else:
            self._line(f"step {step}/{self._total_steps}  {text}")

    def close(self) -> None:
        """Leave the bar where it stands."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _remaining_s(self, step: int) -> float | None:
        done = step - self._first_step
        if done <= 0:
            return None
        return (self._clock() - self._started_at) / done * max(self._total_steps - step, 0)


def open_sink(run_dir: Path, total_steps: int, resume_step: int | None = None) -> ConsoleSink:
    """Show progress on standard output."""
    return ConsoleSink(Console(), total_steps, resume_step or 0, time.monotonic)


def _make_bar(console: Console) -> Progress:
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.fields[values]}"))
    return Progress(*columns, TextColumn("{task.fields[eta]}"), console=console, auto_refresh=False)


def _text(values: Mapping[str, float]) -> str:
    shown = [(label, form, values[name]) for name, (label, form) in _SHOWN.items() if name in values]
    return "  ".join(f"{label} {value:{form}}" for label, form, value in shown if label != "bad steps" or value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
