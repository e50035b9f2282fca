"""Takes secrets out of what is saved or logged: access tokens, logins in addresses, values of keys that name a secret.

Paths, names and numbers stay. Not here: what a bug report leaves out beside secrets (``doctor/report.py``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

_TOKENS = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}|eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]{6,})"
)
_OPTION = re.compile(
    r"(?i)(--?(?:[\w-]*[-_])?(?:token|secret|password|passwd|api[-_]?key|access[-_]?key)[ =])([^\s&'\",;]{6,})"
)
"""On a command line."""
_LOGIN = re.compile(r"(\w+://)[^/\s@]+@")
_ASSIGNED = re.compile(
    r"(?i)\b((?:\w*_)?(?:token|secret|password|passwd|api_?key|access_?key)\s*[=:]\s*|bearer\s+)([^\s&'\",;]{6,})"
)
_KEY = re.compile(r"(?i)(^|_)(secret|password|passwd|credentials?|api_?key|access_?key|auth|(auth|access|hf)_token)$")


def redact_text(text: str) -> str:
    """``text`` without what looks like a secret."""
    text = _LOGIN.sub(rf"\1{HIDDEN}@", _TOKENS.sub(HIDDEN, text))
    return _OPTION.sub(rf"\1{HIDDEN}", _ASSIGNED.sub(rf"\1{HIDDEN}", text))


def redact(value: Any) -> Any:
    """The same plain value, all the way down, keys too, without secrets."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {redact(key): HIDDEN if _names_secret(key, inner) else redact(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact(inner) for inner in value)
    return value


class RedactingFormatter(logging.Formatter):
    """Redacts what is written: the message, its arguments, and the traceback behind it."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record."""
        return redact_text(super().format(record))


def _names_secret(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, str) and bool(value) and _KEY.search(key) is not None
