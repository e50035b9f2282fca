"""How a command ends: errors become messages and exit codes, signals end it without a traceback.

What the terminal, the file or the pipe behind it cannot take is no bug: unknown characters are replaced, a closed
pipe ends the command, and a full disk is named.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 Ctrl-C, 141 closed pipe, 143 SIGTERM.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, TextIO

from helixctl.cli.render import render_bug, render_error, render_stopped
from helixctl.errors import FULL_DISK, FULL_DISK_PAGE, HelixError, UsageError

_log = logging.getLogger(__name__)

_PLACES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""What is wrong with a path, wherever it is met: looking whether it exists may fail already."""


def run_process(command: Callable[[], object]) -> None:
    """Call `command` and end the process."""
    signal.signal(signal.SIGTERM, _terminate)
    _prepare_output()
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _leave_closed_pipe()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # Typer has seen it first
            _leave_closed_pipe()
        raise
    except OSError as error:
        explained = _explain(error)
        render_error(explained) if explained is not None else render_bug(error)
        sys.exit(1 if explained is None else explained.exit_code)
    except HelixError as error:
        render_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        render_stopped()
        sys.exit(130)
    except Exception as error:
        render_bug(error)
        sys.exit(1)


def _leave_closed_pipe() -> NoReturn:
    _discard_output()
    sys.exit(128 + signal.SIGPIPE)


def _prepare_output() -> None:
    """Both streams exist and take every character: a path, a document or a sign of ours may be foreign to them."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _nowhere() -> TextIO:
    """Where the caller has closed a stream."""
    return open(os.devnull, "w", encoding="utf-8")


def _explain(error: OSError) -> HelixError | None:
    """An error that no part has explained, where the world is to blame for it; None for a bug."""
    if error.errno in FULL_DISK:
        _discard_output()
        text = f"cannot write {error.filename or 'the output'}: {error.strerror}"
        return HelixError(text, fix="free space there, then run the command again", see=FULL_DISK_PAGE)
    if error.errno in _PLACES and error.filename is not None:
        _log.debug("unexplained", exc_info=error)
        return UsageError(f"{error.filename}: {error.strerror}", fix="check the path, and the permissions along it")
    return None


def _discard_output() -> None:
    """What is left in the buffer must not fail once more when the interpreter ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


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
