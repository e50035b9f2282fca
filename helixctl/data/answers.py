"""The file of a target's answers: append-only chat JSONL that survives a kill at any moment.

A line is a conversation with its answer, `finish_reason` (stop or length), `prompt_hash`, and `settings`, the
fingerprint of what the answer depends on beside the prompt. A line counts once its newline is written.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from helixctl.errors import DataError, UsageError

_BEGIN = b'{"messages": ['
"""Every line begins so; nothing else is ever cut off as torn."""


def _is_torn(line: bytes) -> bool:
    """Whether a line of ours was cut short by a kill; only the last one can be."""
    if line.endswith(b"\n") or not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
        return False
    try:
        return "settings" in json.loads(line)
    except ValueError:
        return True


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        raise DataError(
            f"answers cannot be written to {path}: {error.strerror or error}{place}",
            fix="make room or give write permission, or set data.train[0].path to another file; "
            "answers that are there are kept",
        ) from error


def check_writable(path: Path) -> None:
    """Find out before a model is loaded whether answers can be written; leaves no new file.

    Raises:
        DataError: they cannot.
    """
    with _writing(path):
        existed = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not existed:
            path.unlink()


class AnswerFile:
    """Open for appending by one process at a time; use it as a context manager.

    Args:
        path: the file; made if absent. A torn last line is cut off.
        settings: fingerprint that every line in the file must have.

    Raises:
        UsageError: another process writes to the file, or its answers were made with other settings.
        DataError: the file holds something else than answers, or cannot be written.
    """

    def __init__(self, path: Path, settings: str) -> None:
        self._path = path
        self._settings = settings
        self.finish_reasons: dict[str, str] = {}
        """Prompt hash -> finish_reason, of all answers in the file."""
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        try:
            self._lock()
            with _writing(path):
                self._recover()
        except BaseException:
            self._file.close()
            raise

    def append(self, messages: Sequence[dict[str, Any]], finish: str, prompt_hash: str, more: dict[str, Any]) -> None:
        """Write an answered conversation and `more` fields; once this returns, a kill of the process cannot lose it."""
        own = {"finish_reason": finish, "prompt_hash": prompt_hash, "settings": self._settings}
        line = json.dumps({"messages": list(messages), **more, **own}, ensure_ascii=False)
        with _writing(self._path):
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        self.finish_reasons[prompt_hash] = finish

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with _writing(self._path) if error is None else suppress(OSError):
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            with suppress(OSError):  # what is left in its buffer has no room on a full disk
                self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process writes to {self._path}", fix="wait for it or end it") from None

    def _recover(self) -> None:
        """Read what is there, and cut off a last line that is torn."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if _is_torn(line):
                self._file.truncate(end)
                return
            self._take(line, f"{self._path}:{number}")
            end += len(line)

    def _take(self, line: bytes, where: str) -> None:
        """Remember one line."""
        try:
            record = json.loads(line)
            prompt_hash, finish, settings = (record[k] for k in ("prompt_hash", "finish_reason", "settings"))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{where} is not a regenerated answer", fix="write to another file") from error
        if settings != self._settings:
            raise UsageError(
                f"{where} was answered with another model, chat template, max_new_tokens, temperature or seed",
                fix="write to another file, or remove this one",
            )
        self.finish_reasons[prompt_hash] = finish
