"""What all tests share: one computing thread, `gpu` tests skip without a GPU, shared data, the command line."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cli.runner import Runner

ROOT = Path(__file__).resolve().parent.parent

# Read by torch when it is first imported: results do not depend on the machine, and test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A test never reaches for a model on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell that starts tests in the background has them ignore Ctrl-C, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes any deadline per example flaky; pytest's own timeout stands. Property tests try the same examples
# in every run, so that a change is judged by what it changed; HELIXCTL_EXPLORE=1 looks for new ones, and a bug that is
# found so becomes an @example.
settings.register_profile("helixctl", deadline=None, derandomize=not os.environ.get("HELIXCTL_EXPLORE"))
settings.load_profile("helixctl")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `gpu` tests where there is no GPU (torch is imported for those only), and `quiet` ones unless asked for."""
    if item.get_closest_marker("quiet") is not None and not os.environ.get("HELIXCTL_QUIET_MACHINE"):
        pytest.skip("needs a machine with nothing else on it: set HELIXCTL_QUIET_MACHINE=1")
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder `shared` beside the checkout: recorded inputs too large for the repository."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("no folder `shared` beside the checkout")
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `helixctl WORDS...`; logging is as before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield Runner(monkeypatch, capsys)
    root.handlers[:], root.level = handlers, level
    logging.getLogger("helixctl").setLevel(logging.NOTSET)
