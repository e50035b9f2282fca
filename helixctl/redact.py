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
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{16,}"
    r"|eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]{6,})"
)
_OPTION = re.compile(
    r"(?i)(--?(?:[\w-]{0,40}[-_])?(?:token|secret|password|passwd|api[-_]?key|access[-_]?key)[ =])([^\s&'\",;]{4,})"
)
"""On a command line."""
_LOGIN = re.compile(r"(\w{1,20}://)(?:[^/\s]{1,300}@|[^/\s:@]{0,300}:(?!\d*/)[^\s@]{0,300}@)")
"""In an address; a password may hold @ or /, and what follows a port is no password."""
_NAME = (
    r"(?:[\w-]{0,40}[_-])?(?:(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!mask_)(?<!stop_)(?<!sep_)(?<!cls_)token|secret|password"
    r"|passwd|passphrase|credentials?|(?:api|access|private)[-_]?key|signature|sig|cookie)"
)
_PLAIN = r"(?!\(hidden\))[^\s&'\",;)}\]]"
"""How a value without quotes begins; what is hidden already is not hidden again."""
_ASSIGNED = re.compile(
    rf"(?i)\b({_NAME}[\"']?\s*[=:]\s*)(?:([\"'])(?!\(hidden\)\2)(?:(?!\2).)+|{_PLAIN}[^\s&'\",;)}}\]]{{5,}})"
)
"""In text, addresses, JSON, dumps of the environment: to the end of a quoted value; plain ones have six characters."""
_SCHEME = r"(?:basic|bearer|digest|token|apikey)\s+"
_HEADER = re.compile(
    rf"(?i)\b(authorization[\"']?\s*[=:]\s*[\"']?(?:{_SCHEME})?|bearer\s+)((?!{_SCHEME}){_PLAIN}[^\s'\",;]+)"
)
_KEY = re.compile(
    r"(?i)(^|[_-])(secret|password|passwd|passphrase|credentials?|(api|access|private)[_-]?key|auth(orization)?|cookie"
    r"|(auth|access|hf)[_-]token)$|^token$"
)


def redact_text(text: str) -> str:
    """``text`` without what looks like a secret."""
    text = _LOGIN.sub(rf"\1{HIDDEN}@", _TOKENS.sub(HIDDEN, text))
    text = _HEADER.sub(rf"\1{HIDDEN}", _OPTION.sub(rf"\1{HIDDEN}", text))
    return _ASSIGNED.sub(lambda found: f"{found[1]}{found[2] or ''}{HIDDEN}", text)


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
