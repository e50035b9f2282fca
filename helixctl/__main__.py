"""Entry point of the command line: `helixctl` and `python -m helixctl`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing has begun yet, so nothing is lost
    from helixctl.cli.app import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
