"""Sets up logging for a command. Libraries only ever call `logging.getLogger(__name__)`."""

from __future__ import annotations

import logging
import os

from helixctl.redact import RedactingFormatter

_FORMAT = "%(asctime)s %(threadName)s %(levelname)s %(name)s: %(message)s"


def set_up_logs(*, verbose: bool) -> None:
    """Our own messages from WARNING up, or from DEBUG up; other libraries from WARNING up. To stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter(_FORMAT if verbose else "%(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # Read when that library is imported. It tells of every retry, twice: by a handler of its own, and by ours.
    os.environ.setdefault("HF_HUB_VERBOSITY", "warning" if verbose else "error")
    logging.getLogger("helixctl").setLevel(logging.DEBUG if verbose else logging.WARNING)
