"""Workers hand batches over through sockets, whose paths are short; programs with workers leave nothing behind."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import pytest

from helixctl.data.loaders import WorkerOptions, build_loader
from helixctl.errors import UsageError
from tests.data.test_loaders import START, pids, run_script
from tests.data.worker_cases import Locked


@pytest.fixture(autouse=True)
def folder_of_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
def test_program_ends_cleanly_and_leaves_nothing_behind(tmp_path: Path, long: bool) -> None:
    """No shards to clean up, so no clean-up that can fail after training; also where TMPDIR is too long for sockets."""
    program = """
from helixctl.data.loaders import *
from helixctl.data.window_set import *
import faulthandler, multiprocessing.util, sys
if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)  # a hang shows where
    for method in sys.argv[1:]:
        workers = WorkerOptions(num_workers=1, start_method=method)
        options = WindowOptions(seq_len=8, rows=2, eos_id=1)
        loader = create_document_loader(ListedDocuments([[5] * 9] * 9), options, workers=workers)
        print(len(list(loader)), len(list(loader)))
    print(multiprocessing.util.get_temp_dir())
    held = iter(loader)
    next(held)
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        temporary = tmp_path / ("long" * 25) if long else Path(short)
        temporary.mkdir(exist_ok=True)
        methods = ["spawn"] if long else ["spawn", "forkserver"]
        done = run_script(program, *methods, TMPDIR=str(temporary))
        *lines, sockets = done.stdout.splitlines()
        assert (done.returncode, lines, done.stderr) == (0, ["6 6"] * len(methods), "")
        assert list(temporary.iterdir()) == [] and not Path(sockets).exists()


def test_a_folder_too_long_for_sockets_is_an_error_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker would drop every batch, and the loop wait for its timeout."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(tmp_path / ("x" * 100)))  # type: ignore[attr-defined]
    before = pids()
    with pytest.raises(UsageError, match=r"cannot make sockets in .*107 bytes at most") as caught:
        build_loader(Locked(), "train", WorkerOptions(num_workers=1), START)
    assert caught.value.fix and "TMPDIR" in caught.value.fix and pids() == before
