"""``export --push``: puts a published folder on a hub. Opt-in, retried, and no token ever reaches a message or a log.

The hub library finds the token itself (``hf auth login`` or ``HF_TOKEN``); it is never read, stored or passed here,
except to blot it out of what is shown.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helixctl.errors import UsageError

ATTEMPTS = 4
FIRST_WAIT_S = 2.0
"""Between attempts; doubles every time."""
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{6,}|(?i:bearer\s+)\S+")
_PERMANENT = (400, 401, 403, 404, 409, 413)
"""Answers that another attempt does not change."""

_log = logging.getLogger(__name__)


def push(folder: Path, repository: str, *, private: bool = True, wait: Callable[[float], object] | None = None) -> str:
    """Upload a folder's files to a model repository, made if absent; returns its address.

    Args:
        folder: What to upload.
        repository: ``owner/name``.
        private: Of a repository that is made now.
        wait: Waits so many seconds between attempts.

    Raises:
        UsageError: the hub refuses, or cannot be reached after several attempts.
    """
    from huggingface_hub import HfApi

    if repository.count("/") != 1:
        raise UsageError(f"--push {repository}: not owner/name", fix="name a repository like my-team/my-drafter")
    api = HfApi()
    wait = wait or threading.Event().wait
    _attempt(lambda: api.create_repo(repository, repo_type="model", private=private, exist_ok=True), repository, wait)
    message = "Upload a drafter written by helixctl"
    done = _attempt(
        lambda: api.upload_folder(
            repo_id=repository, folder_path=str(folder), repo_type="model", commit_message=message
        ),
        repository,
        wait,
    )
    return str(getattr(done, "commit_url", None) or f"https://huggingface.co/{repository}")


def without_tokens(text: str) -> str:
    """``text`` with everything blotted out that is or looks like a token."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        secret = os.environ.get(name)
        if secret:
            text = text.replace(secret, "***")
    return _TOKEN.sub("***", text)


def _attempt(call: Callable[[], Any], repository: str, wait: Callable[[float], object]) -> Any:
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except Exception as error:  # the library raises classes of several HTTP stacks, all told apart by the status
            reason = without_tokens(str(error).strip() or type(error).__name__).splitlines()[0]
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in _PERMANENT or attempt + 1 == ATTEMPTS:
                fix = "log in with `hf auth login` as someone who may write there; the export itself is on the disk"
                # Not chained: the library's own traceback may show headers.
                raise UsageError(f"{repository} was not uploaded: {reason}", fix=fix) from None
            _log.warning("upload to %s failed (%s); trying again", repository, reason)
            wait(FIRST_WAIT_S * 2**attempt)
    raise AssertionError("unreachable")
