"""How a command ends: errors become messages and exit codes, signals end it without a traceback.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from helixctl.cli.render import render_bug, render_error, render_stopped
from helixctl.errors import HelixError


def run_process(command: Callable[[], object]) -> None:
    """Call `command` and end the process."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        command()
    except HelixError as error:
        render_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        render_stopped()
        sys.exit(130)
    except Exception as error:
        render_bug(error)
        sys.exit(1)


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Ctrl-C or SIGTERM while large libraries load ends the process at once.

    An exception in their half-built modules would be swallowed, or shown as an error of theirs. OpenMP is told, unless
    the user says otherwise, that waiting threads sleep: spinning ones take the cores from the other stages.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    handlers = {number: signal.signal(number, _leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
