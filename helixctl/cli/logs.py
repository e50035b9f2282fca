"""Sets up logging for a command. Libraries only ever call `logging.getLogger(__name__)`."""

from __future__ import annotations

import logging

from helixctl.redact import RedactingFormatter

_FORMAT = "%(asctime)s %(threadName)s %(levelname)s %(name)s: %(message)s"


def set_up_logs(*, verbose: bool) -> None:
    """Our own messages from WARNING up, or from DEBUG up; other libraries from WARNING up. To stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter(_FORMAT if verbose else "%(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("helixctl").setLevel(logging.DEBUG if verbose else logging.WARNING)
